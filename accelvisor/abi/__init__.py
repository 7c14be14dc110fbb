"""What a guest and a function agree on: registers, window, rings, commands, programs.

Standard library only, no IO. The guest package ships this room and nothing else of the host side.
All integers are little-endian. Versioning: a minor bump adds, a major bump breaks; the guest
refuses a major version that it does not know.
"""

ABI_MAJOR = 1
ABI_MINOR = 0
ABI_VERSION = ABI_MAJOR << 16 | ABI_MINOR
