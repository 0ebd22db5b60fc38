"""Why no scenario notices when these are taken away: see ``waits.py``."""

_FAILS = "it matters only after a step or a backward that failed half-way, and no scenario has one"
_ROUND_ENDED = "the end of the round has waited for the same copies; it matters only after a round that was abandoned"
_GUARDED = "the guard of the param that is read waits as well; it matters to code that Python hears nothing of"
_NEAR = (
    "no scenario keeps states of some shards on the device beside offloaded ones (`Offload(fraction=)`) with gradients "
    "at rest"
)
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
    "partition.comm.all_gather": {
        (
            "Window.decode",
            "last_used(messages.flat)",
        ): "the stream that allocated the messages waits for another one that decodes them",
    },
    "partition.comm.async_gather": {
        ("AsyncGather.finish", "self._ranks.wait(self._status_messages)"): "for messages: no stream carries them",
    },
    "units.gathered": {
        ("GatheredUnits.start", "self.wait(unit)"): "no scenario quantizes params at stage 3",
    },
    "partition.comm.reduce_scatter_collective": {
        (
            "CodedReduceScatter._finish_first",
            "self._ranks.wait_on_stream(pending)",
        ): "no scenario quantizes gradients",
        ("CodedReduceScatter._finish_first", "last_used(both)"): "no scenario quantizes gradients",
    },
    "domain.overlapped_gather": {
        (
            "OverlappedGather._wait_for_read",
            "self.wait_for((bucket,))",
        ): "the modules of all scenarios read params behind their own hooks",
        ("OverlappedGather.finish", "self._gather.finish()"): "for what ranks tell each other by messages",
        ("_finish_all", "each.finish()"): "no scenario ends or forks its process",
    },
    "module.overlap_hooks": {
        ("OverlapHooks._post_forward", "self._gather.finish()"): "the forward of all scenarios reads every param",
        ("OverlapHooks._pre_module", "self._gather.wait_for(self._needs.get(module, ()))"): _GUARDED,
        ("OverlapHooks._pre_module", "self._gather.finish()"): "no scenario calls a block by itself",
    },
    "partition.comm.group": {
        ("Ranks.begin_exchange", "self.wait(pending)"): "rows lie in host memory: no stream carries them",
    },
    "offload.ring": {
        ("RingStore._make_slots", "self.wait_for_copies()"): "no scenario has a chunk that is longer than all before",
    },
    "offload.cpu_step": {
        ("CpuStepStore.prefetch", "self._drop_staged()"): _FAILS,
        ("CpuStepStore.fetch", "self._streams.to_host(..., after self._gradients_made)"): (
            "the host has waited for the gradients, which are copied after that mark"
        ),
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
        ("HostStorage.give_up", "self._store.wait_for_copies()"): _NO_LOAD,
    },
    "offload.near": {
        ("NearStore.fetch", "self._streams.to_device(..., after self._streams.now())"): _NEAR,
        ("NearStore.fetch", "self._read = self._streams.to_device(copies, self._streams.now())"): _NEAR,
        ("NearStore.fetch", "self._streams.wait(self._read)"): _NEAR,
        ("NearStore.flush", "self._streams.synchronize(self._read)"): _NEAR,
    },
    "step.early": {
        ("_run", "store.flush()"): "it only loads ahead: the sums of early updates lie on the device",
    },
    "domain.host_sum": {("HostSum.abandon", "self._landing.wait_for_copies()"): _FAILS},
    "module.rounds": {
        ("fail_closure", "rounds.finish(error)"): _FAILS,
        ("Rounds.reduce_now", "self.finish()"): "no scenario calls reduce_gradients()",
        ("Rounds.run_round_of_zeros", "self.finish()"): "no scenario has a join() that a rank runs out in",
    },
}

# By the site, as the table writes it.
UNSEEN = {
    f"`{module}`, `{function}`: `{text}`": reason
    for module, sites in _REASONS.items()
    for (function, text), reason in sites.items()
}
