"""Reading a store through zarr-python, which needs to be told of bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeGuard

import ml_dtypes
import numpy as np
import zarr
from zarr.core.dtype.common import DataTypeValidationError
from zarr.core.dtype.npy.float import BaseFloat
from zarr.dtype import data_type_registry

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BFloat16(BaseFloat[Any, Any]):
    """The data type "bfloat16", with the name and JSON that tensorstore uses."""

    dtype_cls = type(_BFLOAT16)
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ("bfloat16",)

    @classmethod
    def _check_native_dtype(cls, dtype: np.dtype[Any]) -> TypeGuard[Any]:
        return bool(dtype == _BFLOAT16)

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> BFloat16:
        """Return this type for ``ml_dtypes.bfloat16``."""
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"not bfloat16: {dtype}")
        return cls(endianness="little")

    def to_native_dtype(self) -> Any:
        """Return ``ml_dtypes.bfloat16`` as a numpy dtype."""
        return _BFLOAT16

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return 2


def register_bfloat16() -> None:
    """Make zarr-python in this process open arrays of data type "bfloat16"."""
    data_type_registry.register("bfloat16", BFloat16)


def open_array(store_path: str | Path, slot: int, name: str) -> zarr.Array[Any]:
    """Return the array of one record as zarr-python sees it, read-only."""
    register_bfloat16()
    return zarr.open_array(Path(store_path) / "slots" / str(slot) / name, mode="r")
