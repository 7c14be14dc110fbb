#!/bin/sh
# -I: neither the environment nor the working directory can slip a module into a function.
exec /usr/bin/python3 -I -m accelvisor.function "$@"
