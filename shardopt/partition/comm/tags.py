"""Tags of messages: gloo matches a message by its tag and its ranks alone, so messages under way at once differ in it.

::

    0 ...                  gradients
    FIRST_TAG + window     shards, by kind of gather; each transport of a group has WINDOWS numbers of its own
    NEVER_SENT             a message that nobody sends: to wait for it in vain ends the others' waits
"""

from __future__ import annotations

from enum import IntEnum

# Above the tags of messages that carry gradients: a shard could arrive in the buffer of a gradient.
FIRST_TAG = 1 << 30
# Numbers of windows that one transport has; 512 transports of a group have numbers of their own. With equal tags a
# message of one optimizer could be taken for one of another.
WINDOWS = 1 << 20
NEVER_SENT = (1 << 31) - 1
_OF_A_KIND = WINDOWS // 4


class GatherKind(IntEnum):
    """What a gather of a unit is for: ranks must run a scheduled one alike, and may differ in the others.

    Gathers of two kinds never meet: one that a rank runs on demand would else take the message of a scheduled one, for
    which its own would then wait in vain.
    """

    SCHEDULED = 0
    ON_DEMAND = 1
    """Of a forward or a backward, by a use that the schedule does not have."""

    EVALUATION = 2
    """Of a forward that no backward follows."""

    def tag_of(self, window: int) -> int:
        """Returns the tag of the messages that fill the window of this number."""
        return FIRST_TAG + self * _OF_A_KIND + window

    @staticmethod
    def of_tag(tag: int) -> tuple[GatherKind, int]:
        """Returns what messages of this tag are for, and the number of their window."""
        window = tag - FIRST_TAG
        kind = GatherKind(window // _OF_A_KIND % 4)
        return kind, window - kind * _OF_A_KIND
