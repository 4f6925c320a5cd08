"""What a model expects of its weights, asked of transformers itself on the meta device."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checkpoint.schema import OUTER_IN, OUTER_OUT, layer_name
from tiering.errors import RefusedError

if TYPE_CHECKING:
    from torch import nn

_AFTER_THE_LAYERS = ("final_", "project_out", "ln_f", "norm_f")
"""Modules that run after the layers even where a model registers them before (OPT does)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter as the model declares it, and the unit in which it is streamed."""

    name: str
    shape: tuple[int, ...]
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Everything that a model of one configuration expects of its weights.

    ``parameters`` are in module order, but the input embedding is first. ``aliases`` maps the
    other names of tied parameters to the one in ``parameters``. ``buffers`` are persistent ones
    with their shapes; ``transient`` are the names of buffers that the model computes itself.
    ``ignored`` are patterns of tensors that the model's authors declare to be of no use to it.
    """

    model_type: str
    parameters: tuple[Parameter, ...]
    aliases: Mapping[str, str]
    buffers: Mapping[str, tuple[int, ...]]
    transient: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    base_prefix: str = ""


def expected_model(config: Mapping[str, Any], where: str) -> Expected:
    """Return what the causal language model of ``config`` expects; builds it on the meta device.

    Raises:
        RefusedError: ``config`` names no causal language model that transformers can build.
    """
    model = _build(config, where)
    names = _parameter_names(model)
    embedding = _embedding_name(model, names, where)
    list_name, layers = _layer_list(model, where)
    parameters = [
        Parameter(name=name, shape=tuple(parameter.shape), unit=unit)
        for name, parameter, unit in _by_unit(model, list_name)
    ]
    parameters.sort(key=lambda parameter: (_order(parameter, layers), parameter.name != embedding))
    buffers = dict(model.named_buffers())
    persistent = [name for name in model.state_dict() if name in buffers]
    return Expected(
        model_type=str(config["model_type"]),
        parameters=tuple(parameters),
        aliases={name: target for name, target in names.items() if name != target},
        buffers={name: tuple(buffers[name].shape) for name in persistent},
        transient=frozenset(buffers).difference(persistent),
        ignored=tuple(sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
        base_prefix=model.base_model_prefix,
    )


def _build(config: Mapping[str, Any], where: str) -> Any:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise RefusedError(f"{where}: model_type is missing; expected a causal language model's")
    with _quiet():
        import torch
        import transformers

        if model_type not in transformers.CONFIG_MAPPING:
            raise RefusedError(
                f"{where}: model_type {model_type!r} is unknown to transformers "
                f"{transformers.__version__}; code that a model brings along is not run"
            )
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        try:
            parsed = transformers.CONFIG_MAPPING[model_type].from_dict(plain)
        except Exception as error:  # a configuration class may raise anything
            raise RefusedError(f"{where}: not a configuration: {_first_line(error)}") from error
        if type(parsed) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise RefusedError(f"{where}: model_type {model_type!r} is not a causal language model")
        try:
            with torch.device("meta"):
                return transformers.AutoModelForCausalLM.from_config(parsed)
        except Exception as error:  # so may a constructor
            raise RefusedError(
                f"{where}: transformers cannot build this {model_type}: {_first_line(error)}"
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from talking, and from looking for the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("transformers")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def _parameter_names(model: nn.Module) -> dict[str, str]:
    """Return every name of every parameter with the first name of the same parameter."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _embedding_name(model: Any, names: Mapping[str, str], where: str) -> str:
    weight = getattr(model.get_input_embeddings(), "weight", None)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is weight:
            return names[name]
    raise RefusedError(f"{where}: the model has no input embedding")


def _layer_list(model: Any, where: str) -> tuple[str, int]:
    """Return the name and the length of the list of decoder layers: the largest outermost one."""
    from torch import nn

    lists = {name: item for name, item in model.named_modules() if isinstance(item, nn.ModuleList)}
    outermost = {
        name: item
        for name, item in lists.items()
        if len(item) and not any(name.startswith(f"{other}.") for other in lists)
    }
    if not outermost:
        raise RefusedError(f"{where}: the model has no list of layers")
    name = max(outermost, key=lambda name: _parameter_count(outermost[name]))
    return name, len(outermost[name])


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _by_unit(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yield each parameter once with its unit: before, inside or after the list of layers."""
    seen_layers = False
    for name, parameter in model.named_parameters():
        if name.startswith(f"{layers}."):
            seen_layers = True
            yield name, parameter, layer_name(int(name[len(layers) + 1 :].split(".")[0]))
        elif seen_layers or _runs_after(name):
            yield name, parameter, OUTER_OUT
        else:
            yield name, parameter, OUTER_IN


def _runs_after(name: str) -> bool:
    return any(part.startswith(_AFTER_THE_LAYERS) for part in name.split("."))


def _order(parameter: Parameter, layers: int) -> int:
    """Return the place of the parameter's unit; sorting by it keeps module order inside units."""
    if parameter.unit == OUTER_IN:
        return -1
    if parameter.unit == OUTER_OUT:
        return layers
    return int(parameter.unit.rsplit(".", 1)[1])
