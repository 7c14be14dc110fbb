"""How many workers one message or command may cost before it is refused.

A worker that crashed or hung did so over what it was at. One that was killed from outside most
likely was not to blame for it, but it may have been (a host that runs out of memory kills, too), so
those count as well, by less. Standard library only.
"""

from __future__ import annotations

from accelvisor.limits import LIMITS

#: Points at which a message or command is refused.
MOST = LIMITS.worker_kills
CRASH = -(-LIMITS.worker_kills // LIMITS.worker_deaths)
KILL = 1
