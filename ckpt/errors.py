"""What can go wrong with a checkpoint, as plain exceptions whose text says what to do about it."""


class CheckpointError(Exception):
    """Base of every error that the checkpoint engine raises on purpose."""


class NotCommitted(CheckpointError):
    """There is no committed checkpoint where one was asked for."""


class Corrupt(CheckpointError):
    """What is on storage is not what was committed: damaged, cut, forged or misplaced."""


class NewerFormat(CheckpointError):
    """Written by a newer version of this engine than the one that reads it."""


class Fenced(CheckpointError):
    """A newer launch has taken the run over; this one may no longer write to it."""


class RunBusy(CheckpointError):
    """Another launch is still alive and writing to the run."""


class StateError(CheckpointError):
    """The state given to save or to restore into can't be handled as asked."""


class StorageError(CheckpointError):
    """A storage operation failed, or an address makes no sense; the `OSError`, if any, is the `__cause__`."""
