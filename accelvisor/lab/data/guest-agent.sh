#!/bin/sh
# The environment here is that of every program run through the agent.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root LANG=C.UTF-8
cd /root || exit
exec qemu-ga --method=virtio-serial --path=/dev/virtio-ports/org.qemu.guest_agent.0 \
    --statedir=/run --pidfile=/run/qemu-ga.pid --logfile=/run/qemu-ga.log
