"""How does a training survive?

By checkpoints that load at any number of ranks, any stage and any bucket size, and that a crash leaves whole.

::

    runs/                                    what save_checkpoint(directory, ...) is given
        latest                               the name of the newest checkpoint, replaced atomically
        000007-step120-<token>/              a published checkpoint: a reader sees all of it, or nothing
            manifest.json                    every tensor by name: shape, dtype, the file and offset of each range
            rank-00000.safetensors           what rank 0 held: ranges of params, masters, states
            rank-00001.safetensors
            owner-<token>                    marks a directory that shardopt made and may remove
        saving-<token>/                      a checkpoint that is being written, or that a crash left behind

The files do not depend on the mesh: a *tensor* is cut into *ranges* of elements, in the storage order of the param,
and each range is contiguous in one file. Each chunk of a range has a checksum, so a rank that needs a part of a range
reads and verifies that part alone. Where tensor parallelism cuts a param, each *box* of its elements is a tensor of
its own; a rank that loads assembles its box from the saved ones, which may be cut in another way.

Imports point down: ``save``, ``load`` -> ``background``, ``write`` -> ``join``, ``plan_save``, ``plan_load``, ``match``
-> ``model`` -> ``claims``, ``names``, ``collectives`` -> ``mesh_ranks``; all of these -> ``assemble`` -> ``reader`` ->
``publish``, ``manifest`` -> ``records`` -> ``param_box`` -> ``typed_json``. ``files`` has all I/O.
"""
