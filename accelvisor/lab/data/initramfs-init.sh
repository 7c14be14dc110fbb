#!/bin/sh
# First program of a lab guest: puts the root together (base, then accelvisor's layer, then memory)
# and hands over. Kept to a handful of steps, since under emulation each costs milliseconds.
export PATH=/bin

mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in /modules/*.ko; do insmod "$module"; done

# Disks are found by serial: a test may add others, in any order.
disk() {
    found=
    for entry in /sys/block/vd*; do
        read -r serial 2>/dev/null <"$entry/serial"
        [ "$serial" = "$1" ] && found="/dev/${entry##*/}" && return
    done
}

disk base
base=$found
if [ -z "$base" ]; then
    echo "accelvisor guest: no disk with the serial 'base'; disks: $(ls /sys/block)"
    exec sh
fi
mount -t tmpfs -o mode=755 memory /memory
mkdir /memory/upper /memory/work
mount -t squashfs -o ro "$base" /base
lower=/base
disk layer
if [ -n "$found" ] && mount -t squashfs -o ro "$found" /layer; then lower=/layer:/base; fi
mount -t overlay -o "lowerdir=$lower,upperdir=/memory/upper,workdir=/memory/work" root /root
for directory in dev proc sys; do mount -o move "/$directory" "/root/$directory"; done
exec switch_root /root /sbin/init
