#!/bin/sh
# What the guest agent calls: shutdown -h -P|-r|-H +0 MESSAGE. Init does it, services first.
for word in "$@"; do
    case $word in
        -r) exec busybox reboot ;;
        -H) exec busybox halt ;;
    esac
done
exec busybox poweroff
