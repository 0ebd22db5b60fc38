"""Saving in the background: the handle, and the thread that writes while training goes on."""

import threading
import warnings
from pathlib import Path

from .staging import Staging
from .write import RankWriter


class Saving:
    """A checkpoint that is being written, or was.

    Attributes:
        path: where it is, once :meth:`wait` has returned.
    """

    def __init__(self, path: Path, thread: threading.Thread | None = None):
        self.path = path
        self._thread = thread
        self._problem: BaseException | None = None
        self._was_told = False

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until the checkpoint is published, on this rank alone.

        Raises:
            CheckpointError: it could not be saved, on whatever rank; the checkpoints before it are whole.
        """
        if self._thread is not None:
            self._thread.join()
        self._was_told = True
        if self._problem is not None:
            raise self._problem
        return self.path

    def __repr__(self) -> str:
        state = "being written" if not self.done else "failed" if self._problem is not None else "published"
        return f"Saving({str(self.path)!r}, {state})"


class Background:
    """The thread that writes a module's checkpoints, one at a time, and the memory that it writes from."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._saving: Saving | None = None

    def wait(self) -> None:
        """Waits until nothing is being written, so that the staging memory can be used again."""
        saving, self._saving = self._saving, None
        if saving is None or saving._thread is None:
            return
        saving._thread.join()
        if saving._problem is not None and not saving._was_told:
            warnings.warn(
                f"the last asynchronous checkpoint failed and wait() was not called: {saving._problem}", stacklevel=3
            )

    def start(self, writer: RankWriter) -> Saving:
        def work() -> None:
            try:
                writer.run()
            except BaseException as error:
                saving._problem = error

        # Not a daemon: the interpreter waits for it at its end, so that a checkpoint begun is a checkpoint made.
        thread = threading.Thread(target=work, name="shardopt-checkpoint")
        saving = Saving(writer.site.published, thread)
        self._saving = saving
        thread.start()
        return saving
