"""What a ZeRO stage shards: one answer for each kind of tensor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroStage:
    """A stage of ZeRO (Rajbhandari et al., arXiv 1910.02054). What is not sharded is replicated on every rank."""

    number: int

    @property
    def shards_states(self) -> bool:
        """True if each rank holds its slice of states and masters."""
        return self.number >= 1

    @property
    def shards_params(self) -> bool:
        return self.number >= 3
