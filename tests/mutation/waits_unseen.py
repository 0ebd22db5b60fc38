"""Why no scenario notices when these are taken away: see ``waits.py``."""

_FAILS = "it matters only after a step or a backward that failed half-way, and no scenario has one"
_HOST_KNOWS = (
    "the host knows already: it waits whenever a table is copied to the device, which follows each use of the stream. "
    "It is needed once these copies do not block"
)
_ROUND_ENDED = "the end of the round has waited for the same copies; it matters only after a round that was abandoned"
_NO_LOAD = "no scenario loads states, or gives them up, while copies of a step are under way"

_REASONS = {
    "partition.reducer": {
        ("Reducer.deliver", "filling.buffer.mark()"): (
            "no scenario starts the reduction of a gradient that is its own buffer on another stream than its leaf's"
        ),
        ("Reducer.finish_late", "buffer.join()"): "autograd joins the streams of all leaves before it calls back",
        ("Reducer.finish_late", "self._wait_for_copies()"): "no scenario has late gradients that are at rest",
        ("Reducer._sum_across", "self._across.finish()"): "no scenario has a mesh of two dimensions",
    },
    "partition.comm.transport": {
        ("Gather.finish", "self._all_gather.finish()"): "the second of two, for messages: no stream carries them",
    },
    "partition.comm.group": {
        ("Ranks.wait", "work.wait(deadline)"): "no scenario sets a timeout",
    },
    "offload.ring": {
        ("RingStore.prefetch", "slot.mark = self._stored"): (
            "copies to the device run in order, and the first slot's own last copy is late enough in every scenario"
        ),
        ("RingStore._make_slots", "self.wait_for_copies()"): "no scenario has a chunk that is longer than all before",
        ("RingStore._load", "self._read = slot.mark if chunk.gradients else self._read"): _HOST_KNOWS,
        ("RingStore.flush", "self._streams.synchronize(self._read)"): _HOST_KNOWS,
    },
    "offload.cpu_step": {
        ("CpuStepStore.prefetch", "self._drop_staged()"): _FAILS,
        ("CpuStepStore._fill", "self._streams.to_host(..., after self._gradients_made)"): _HOST_KNOWS,
        ("CpuStepStore._send", "self._streams.to_device(..., after self._streams.now())"): (
            "the host has waited for the gradients, which are copied after all kernels that read the params"
        ),
        ("CpuStepStore.flush", "self._inner.flush()"): "host memory has nothing to flush, and a disk has no streams",
        ("CpuStepStore._drop_staged", "self._streams.synchronize(slot.mark)"): _FAILS,
        ("CpuStepStore.wait_for_copies", "self._drop_staged()"): _FAILS,
    },
    "offload.gradients": {
        ("HostLanding.zeros", "self.wait_for_copies()"): _ROUND_ENDED,
        ("HostLanding.load", "self._to_device = self._streams.to_device([(slot.staged[0], total)], slot.mark)"): (
            "the sum is copied to the host again in the same round, after the kernels that waited for this copy"
        ),
        ("HostLanding.close", "self.wait_for_copies()"): _ROUND_ENDED,
    },
    "offload.host": {
        ("HostStorage.write", "self._store.wait_for_copies()"): _NO_LOAD,
        ("HostStorage.renew", "self._store.wait_for_copies()"): _NO_LOAD,
        ("HostStorage.release", "self._store.wait_for_copies()"): _NO_LOAD,
    },
    "domain.host_sum": {("HostSum.abandon", "self._landing.wait_for_copies()"): _FAILS},
    "step.update": {
        ("_update_or_roll_back", "store.flush()"): "it waits for a disk, which has no streams",
        ("_update_in_memory_and_gather", "domain.store.flush()"): _HOST_KNOWS,
    },
}

# By the site, as the table writes it.
UNSEEN = {
    f"`{module}`, `{function}`: `{text}`": reason
    for module, sites in _REASONS.items()
    for (function, text), reason in sites.items()
}
