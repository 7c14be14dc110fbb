#!/usr/bin/busybox sh
# Run once by the guest's init before anything else. By busybox alone, which is one static program:
# those of Debian are linked anew each time, which takes several times as long under emulation.
mount() { /usr/bin/busybox mount "$@"; }

mount -t tmpfs -o mode=755,nosuid,nodev run /run
mount -t tmpfs -o mode=1777,nosuid,nodev tmp /tmp
/usr/bin/busybox mkdir -p /run/lock /dev/pts /dev/shm /dev/virtio-ports
mount -t devpts -o gid=5,mode=620 devpts /dev/pts
mount -t tmpfs -o mode=1777,nosuid,nodev shm /dev/shm
read -r words </proc/cmdline
for word in $words; do
    case $word in hostname=*) echo "${word#hostname=}" >/proc/sys/kernel/hostname ;; esac
done
/usr/bin/busybox ip link set lo up
# What udev would do: the agent looks for its port by name.
for port in /sys/class/virtio-ports/*; do
    read -r name <"$port/name" && /usr/bin/busybox ln -s "../${port##*/}" "/dev/virtio-ports/$name"
done
true
