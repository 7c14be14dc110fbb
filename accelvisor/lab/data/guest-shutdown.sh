#!/bin/sh
# What the guest agent calls: shutdown -P|-r|-H +0 MESSAGE. Init does it, services first.
case $1 in
    -r) exec busybox reboot ;;
    -H) exec busybox halt ;;
    *) exec busybox poweroff ;;
esac
