"""How does a training survive?

By checkpoints that load at any number of ranks, any stage and any bucket size, and that a crash leaves whole.

::

    runs/                                    what save_checkpoint(directory, ...) is given
        latest                               the name of the newest checkpoint, replaced atomically
        000007-step120-<token>/              a published checkpoint: a reader sees all of it, or nothing
            manifest.json                    every tensor by name: shape, dtype, and where each range of it lies
            rank-00000.safetensors           what rank 0 held: ranges of params, masters, states
            rank-00001.safetensors
                owner-<token>                    says that shardopt made this directory, and may remove it
        saving-<token>/                      one that is being written, or was left by a crash

The files are independent of the mesh: a *tensor* is cut into *ranges* of elements, in the storage order of the param,
and each range lies in one piece in one file. Checksums are per chunk of a range, so a rank that needs a part of a
range reads, and proves, that part only. What tensor parallelism cuts is kept as one tensor a *block*, a box of the
param's elements; a rank that loads assembles what it needs of blocks that may be cut otherwise.

Imports point down: ``save``, ``load`` -> ``background``, ``write`` -> ``join``, ``plan_save``, ``plan_load``, ``fit``
-> ``model`` -> ``claims``, ``names``, ``meeting`` -> ``everyone``; all of these -> ``assemble`` -> ``reader`` ->
``publish``, ``manifest`` -> ``records`` -> ``block``. ``files`` has all I/O.
"""
