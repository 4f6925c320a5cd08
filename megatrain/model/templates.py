"""The Hugging Face model without its weights: parameters on meta, buffers and attributes real."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatrain.model.families import require_supported
from tiering.errors import RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A causal LM in training mode whose parameters are all on meta."""

    model: Any
    base: Any
    layer_list: str
    layers: tuple[nn.Module, ...]
    embedding: nn.Embedding
    embedding_name: str
    head: nn.Linear
    head_name: str
    tied: bool

    @property
    def layer_prefix(self) -> str:
        """Qualified name of the list of layers."""
        return f"{_name_of(self.model, self.base)}.{self.layer_list}".lstrip(".")

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name; a tied head goes by its table's name."""
        return {name: tuple(p.shape) for name, p in self.model.named_parameters()}


def read_config(config_dir: Path, *, any_family: bool) -> Any:
    """Return the configuration in ``config_dir``, with what would change the outputs turned off.

    Raises:
        RefusedError: It cannot be read, or asks for something that is not streamed.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            config_dir, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise RefusedError(f"{config_dir}: no usable model configuration: {error}") from error
    if not any_family:
        require_supported(config.model_type)
    _require_plain(config)
    config.output_hidden_states = False
    config.output_attentions = False
    config.return_dict = True
    return config


def build(
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    buffers: Mapping[str, torch.Tensor],
) -> Template:
    """Return the model of ``config`` in training mode, its buffers on ``device``.

    ``buffers`` are the values of persistent buffers, which only a checkpoint knows.

    Raises:
        RefusedError: The model cannot be cut into a front, a row of layers and a tail.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, ImportError) as error:
        raise RefusedError(f"cannot build a {config.model_type} causal LM: {error}") from error
    model.train()
    _place_buffers(model, device, buffers)
    return _take_apart(model)


def _require_plain(config: Any) -> None:
    kind = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        raise RefusedError(f"{kind}: quantized weights cannot be trained; convert them first")
    if getattr(config, "is_encoder_decoder", False):
        raise RefusedError(f"{kind}: an encoder-decoder is not a causal language model")
    if getattr(config, "output_router_logits", False):
        raise RefusedError(
            f"{kind}: output_router_logits adds a loss that no layer sees; set it to false"
        )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter that this thread registers to meta before it is initialised."""
    builder = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != builder:
            return None
        empty = torch.empty_like(parameter, device="meta")
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _place_buffers(
    model: nn.Module, device: torch.device, values: Mapping[str, torch.Tensor]
) -> None:
    persistent = (
        model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    )
    if missing := sorted(persistent - values.keys()):
        raise RefusedError(f"the values of buffer {missing[0]} were not given")
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                value = values.get(f"{path}.{name}".lstrip("."), buffer)
                module._buffers[name] = _like(buffer, value, f"{path}.{name}").to(device)


def _like(buffer: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
    if value.shape != buffer.shape:
        raise RefusedError(
            f"buffer {name}: shape {tuple(value.shape)}, the model has {tuple(buffer.shape)}"
        )
    return value.to(buffer.dtype)


def _take_apart(model: Any) -> Template:
    base = model.base_model
    layer_list, layers = _find_layers(base)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kind = model.config.model_type
    if not isinstance(embedding, nn.Embedding):
        raise RefusedError(f"{kind}: the input embedding is a {type(embedding).__name__}")
    if type(head) is not nn.Linear:
        raise RefusedError(f"{kind}: the head is a {type(head).__name__}, not a plain Linear")
    template = Template(
        model=model,
        base=base,
        layer_list=layer_list,
        layers=layers,
        embedding=embedding,
        embedding_name=f"{_name_of(model, embedding)}.weight",
        head=head,
        head_name=_name_of(model, head),
        tied=head.weight is embedding.weight,
    )
    _require_unshared(template)
    return template


def _find_layers(base: nn.Module) -> tuple[str, tuple[nn.Module, ...]]:
    lists = {
        name: tuple(child)
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList) and len(child)
    }
    if len(lists) != 1:
        found = ", ".join(lists) or "none"
        raise RefusedError(f"{type(base).__name__}: need one list of layers, found {found}")
    return next(iter(lists.items()))


def _require_unshared(template: Template) -> None:
    """Refuse parameters that are used under two names, the tied table excepted."""
    first: dict[int, str] = {}
    for name, parameter in template.model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        pair = {name, other}
        if len(pair) == 2 and pair != {template.embedding_name, f"{template.head_name}.weight"}:
            raise RefusedError(f"{other} and {name} are one parameter in two places")


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    return names[id(wanted)]
