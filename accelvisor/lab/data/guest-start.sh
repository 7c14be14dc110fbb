#!/bin/sh
# Run once by the guest's init before anything else.
mount -t tmpfs -o mode=755,nosuid,nodev run /run
mount -t tmpfs -o mode=1777,nosuid,nodev tmp /tmp
mkdir -p /run/lock /dev/pts /dev/shm /dev/virtio-ports
mount -t devpts -o gid=5,mode=620 devpts /dev/pts
mount -t tmpfs -o mode=1777,nosuid,nodev shm /dev/shm
for word in $(cat /proc/cmdline); do
    case $word in hostname=*) hostname "${word#hostname=}" ;; esac
done
busybox ip link set lo up
# What udev would do: the agent looks for its port by name.
for port in /sys/class/virtio-ports/*; do
    [ -r "$port/name" ] && ln -s "../${port##*/}" "/dev/virtio-ports/$(cat "$port/name")"
done
true
