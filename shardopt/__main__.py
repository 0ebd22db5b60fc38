"""The command line: ``python -m shardopt <command>``; see :mod:`shardopt.tools.cli`."""

from shardopt.tools.cli import main as main

if __name__ == "__main__":
    raise SystemExit(main())
