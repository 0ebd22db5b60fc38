"""What other tests compiled in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch._dynamo.convert_frame as frames


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Within, torch.compile has compiled nothing yet: a step waits for its gather once it has."""
    with patch.object(frames, "FRAME_COUNTER", 0):
        yield
