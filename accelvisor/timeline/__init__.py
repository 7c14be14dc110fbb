"""Who ran when: traces as Chrome trace JSON, and as pictures. Pure: values in, text or bytes out.

A neutral room: guest and host both use it, so it knows nothing of either. Standard library and
numpy only.
"""

from accelvisor.timeline.chrome import chrome
from accelvisor.timeline.picture import png, svg
from accelvisor.timeline.spans import Span, Trace, read

__all__ = ["Span", "Trace", "chrome", "png", "read", "svg"]
