"""The only module that touches llama.cpp: one model, one context, through the low-level API of llama-cpp-python.

Untyped from here down, typed from here up. Runs in the worker process alone.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from appliance.engine.llama_cpp.sampler import Sampler
from appliance.engine.types import SamplingParams

VERSION: str = llama_cpp.__version__
_CONTROL_ATTRS = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN


class RuntimeFailure(Exception):
    """llama.cpp reported an error. The message carries its code, never content."""


class Aborted(Exception):
    """`decode` was interrupted by `interrupt`; the sequence holds some of the batch and must be cut back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """`context_length` and `n_batch` in tokens."""

    fd: int
    context_length: int
    n_batch: int
    threads: int


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _discard_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """llama.cpp logs token texts in places: nothing of it leaves the worker."""


class LlamaRuntime:
    """A loaded model with one context. Not thread-safe, `interrupt` and `clear_interrupt` excepted."""

    def __init__(self, options: RuntimeOptions, *, progress: Callable[[float], None]) -> None:
        """Load the model from the sealed descriptor. Raises RuntimeFailure."""
        llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.options = options
        # The abort callback runs after every graph node, hundreds of times per token. libc's strlen is a native
        # `bool (*)(void *)` in disguise: "" is false, one byte is true, and no Python runs in the middle of a decode.
        self._abort = ctypes.create_string_buffer(2)
        self._model = self._load(progress)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._context = self._make_context()
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self._views = _views(self._batch, options.n_batch)
        self._pieces: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}

    def _load(self, progress: Callable[[float], None]) -> Any:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        params.check_tensors = True

        def on_progress(fraction: float, user_data: object) -> bool:
            progress(fraction)
            return True

        callback = llama_cpp.llama_progress_callback(on_progress)
        params.progress_callback = callback
        model = llama_cpp.llama_model_load_from_file(f"/proc/self/fd/{self.options.fd}".encode(), params)
        if not model:
            raise RuntimeFailure("llama.cpp refuses the model file")
        return model

    def _make_context(self) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.options.context_length
        params.n_batch = params.n_ubatch = self.options.n_batch
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = self.options.threads
        # On: the shapes of prefill and decode then agree bit for bit where the model format allows it.
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        params.abort_callback = ctypes.cast(ctypes.CDLL(None).strlen, llama_cpp.ggml_abort_callback)
        params.abort_callback_data = ctypes.addressof(self._abort)
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeFailure(f"llama.cpp cannot make a context of {self.options.context_length} tokens")
        return context

    # -- vocabulary ------------------------------------------------------------------------------------------------

    @cached_property
    def vocabulary_size(self) -> int:
        return int(llama_cpp.llama_vocab_n_tokens(self._vocab))

    @cached_property
    def control_texts(self) -> Sequence[tuple[int, str]]:
        found = []
        for token in range(self.vocabulary_size):
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & _CONTROL_ATTRS:
                raw: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token)
                if raw:
                    found.append((token, raw.decode("utf-8", "replace")))
        return tuple(found)

    @cached_property
    def bos(self) -> int | None:
        if not llama_cpp.llama_vocab_get_add_bos(self._vocab):
            return None
        token = int(llama_cpp.llama_vocab_bos(self._vocab))
        return token if token >= 0 else None

    def special_text(self, which: str) -> str:
        """Text of the 'bos' or 'eos' token, empty where the model has none."""
        token = getattr(llama_cpp, f"llama_vocab_{which}")(self._vocab)
        if token < 0:
            return ""
        raw: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return raw.decode("utf-8", "replace")

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of `text`; never adds BOS or EOS."""
        raw = text.encode()
        capacity = len(raw) + 16
        buffer = (llama_cpp.llama_token * capacity)()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), buffer, capacity, False, parse_special)
        if count < 0:
            raise RuntimeFailure(f"the tokenizer failed with {count}")
        return buffer[:count]

    def piece(self, token: int) -> bytes:
        """Bytes of a token as output text; control tokens have none."""
        known = self._pieces.get(token)
        if known is None:
            buffer = ctypes.create_string_buffer(512)
            size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, 512, 0, False)
            if size < 0:
                buffer = ctypes.create_string_buffer(-size)
                size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, -size, 0, False)
            known = self._pieces[token] = buffer.raw[:size]
        return known

    def is_end(self, token: int) -> bool:
        """True for the tokens that end a generation (end of sequence, end of turn)."""
        known = self._eog.get(token)
        if known is None:
            known = self._eog[token] = bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))
        return known

    # -- evaluation ------------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], *, position: int, sequence: int, want_logits: bool) -> None:
        """Evaluate at most `n_batch` tokens at consecutive positions. Raises Aborted or RuntimeFailure."""
        count = len(tokens)
        token_view, position_view, sequence_view, logits_view = self._views
        token_view[:count] = tokens
        position_view[:count] = np.arange(position, position + count, dtype=np.int32)
        sequence_view[:count] = sequence
        logits_view[:count] = 0
        logits_view[count - 1] = want_logits
        self._batch.n_tokens = count
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status == 2:
            raise Aborted
        if status != 0:
            raise RuntimeFailure(f"llama_decode failed with {status}")

    def forget(self, sequence: int, *, start: int = 0) -> None:
        """Drop a sequence's cached tokens from position `start` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def interrupt(self) -> None:
        """Make a running `decode` raise Aborted soon. May be called from any thread."""
        self._abort[0] = b"\x01"

    def clear_interrupt(self) -> None:
        self._abort[0] = b"\x00"

    def sampler(self, params: SamplingParams) -> Sampler:
        return Sampler(self._context, params)

    @staticmethod
    def libraries() -> tuple[tuple[str, bytes], ...]:
        """Sorted (basename, SHA-256) of llama-cpp-python's native libraries mapped into this process."""
        root = Path(llama_cpp.__file__).resolve().parent
        mapped = set()
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{root}/") and ".so" in fields[5]:
                mapped.add(Path(fields[5]))
        return tuple(sorted((path.name, hashlib.sha256(path.read_bytes()).digest()) for path in mapped))


_Int32 = npt.NDArray[np.int32]


def _views(batch: Any, size: int) -> tuple[_Int32, _Int32, _Int32, npt.NDArray[np.int8]]:
    """NumPy views of the batch's arrays: token, position, sequence id, logits flag.

    llama_batch_init allocates one id array per token; they are pointed at one contiguous block of ours instead, which
    the view writes. `n_seq_id` is always 1.
    """
    ids = np.zeros(size, dtype=np.int32)
    for index in range(size):
        batch.n_seq_id[index] = 1
    pointers = ctypes.cast(batch.seq_id, ctypes.POINTER(ctypes.c_void_p))
    for index in range(size):
        pointers[index] = ids.ctypes.data + 4 * index
    as_array = np.ctypeslib.as_array
    return (
        as_array(batch.token, shape=(size,)),
        as_array(batch.pos, shape=(size,)),
        ids,
        as_array(batch.logits, shape=(size,)),
    )
