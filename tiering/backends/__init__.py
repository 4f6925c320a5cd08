"""One file per kind of storage, each behind the same small interface."""
