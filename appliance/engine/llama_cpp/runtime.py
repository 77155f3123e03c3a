"""The only module that touches llama.cpp: one model, one context, through the low-level API of llama-cpp-python.

Untyped from here down, typed from here up. Runs in the worker process alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from appliance.engine.batch import Segment
from appliance.engine.llama_cpp.sampler import Candidates, Sampler
from appliance.engine.types import SamplingParams

_CONTROL_ATTRS = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN


# States are tens of megabytes, and each pass over fresh memory costs milliseconds of page faults. With NULL for its
# content this makes a bytes object that C code fills before anybody else sees it, as its documentation allows.
_unfilled_bytes: Callable[[None, int], bytes] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


class RuntimeFailure(Exception):
    """llama.cpp reported an error. The message carries its code, never content."""


class Aborted(Exception):
    """`decode` was interrupted by `interrupt`; the sequence holds some of the batch and must be cut back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """`kv_tokens` is the number of cells all sequences share, `n_batch` the most rows of one `decode`."""

    fd: int
    kv_tokens: int
    n_batch: int
    n_sequences: int
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
        self.threads = options.threads
        """Those of the next `decode`."""
        # The abort callback runs after every graph node, hundreds of times per token. libc's strlen is a native
        # `bool (*)(void *)` in disguise: "" is false, one byte is true, and no Python runs in the middle of a decode.
        self._abort = ctypes.create_string_buffer(2)
        self._model = self._load(progress)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._context = self._make_context()
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self._views = _views(self._batch, options.n_batch)
        self._positions = np.arange(options.kv_tokens + options.n_batch, dtype=np.int32)
        self._candidates = Candidates(self.vocabulary_size)
        self._pieces: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}

    def _load(self, progress: Callable[[float], None]) -> Any:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        # Off: llama.cpp would repack weights for kernels that round in another order, and those for AMX, compiled by
        # GCC 12, load a tile configuration that was never stored: the worker dies at the first product of two rows.
        params.use_extra_bufts = False
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
        params.n_ctx = self.options.kv_tokens
        params.n_batch = params.n_ubatch = self.options.n_batch
        params.n_seq_max = self.options.n_sequences
        # One pool of cells: a sequence takes what it needs, and rows of many sequences go through one graph.
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = self.options.threads
        # On: the shapes of prefill and decode then agree bit for bit where the model format allows it.
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        params.abort_callback = ctypes.cast(ctypes.CDLL(None).strlen, llama_cpp.ggml_abort_callback)
        params.abort_callback_data = ctypes.addressof(self._abort)
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeFailure(f"llama.cpp cannot make a context of {self.options.kv_tokens} tokens")
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

    def spell(self, texts: Sequence[str]) -> None:
        """From now on control tokens that occur in `texts` are output text, as all other tokens are."""
        for token, text in self.control_texts:
            if any(text in known for known in texts):
                self._pieces[token] = text.encode()

    def is_end(self, token: int) -> bool:
        """True for the tokens that end a generation (end of sequence, end of turn)."""
        known = self._eog.get(token)
        if known is None:
            known = self._eog[token] = bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))
        return known

    # -- evaluation ------------------------------------------------------------------------------------------------

    def decode(self, segments: Sequence[Segment]) -> None:
        """Evaluate at most `n_batch` rows, those of `segments` one after another. Raises Aborted or RuntimeFailure.

        Whatever it raises, some of the rows may be in the context: the caller cuts every sequence of it back.
        """
        token_view, position_view, sequence_view, logits_view = self._views
        row = 0
        for segment in segments:
            end = row + len(segment.tokens)
            token_view[row:end] = segment.tokens
            position_view[row:end] = self._positions[segment.position : segment.position + end - row]
            sequence_view[row:end] = segment.sequence
            logits_view[row:end] = 0
            logits_view[end - segment.outputs : end] = 1
            row = end
        self._batch.n_tokens = row
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status == 2:
            raise Aborted
        if status != 0:
            raise RuntimeFailure(f"llama_decode failed with {status}")

    def best(self, row: int) -> int:
        """The most probable token of one row of the last `decode`; of equal ones the first."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(pointer, shape=(self.vocabulary_size,)).argmax())

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """A copy of the logits of one row of the last `decode`, [vocabulary_size]."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary_size,)).copy()

    def forget(self, sequence: int, *, start: int = 0) -> bool:
        """Drop a sequence's cells from position `start` on. False: this kind of memory cannot be cut there."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def save(self, sequence: int) -> bytes:
        """What the context holds of a sequence, for `restore`."""
        size = int(llama_cpp.llama_state_seq_get_size(self._context, sequence))
        state = _unfilled_bytes(None, size)
        if llama_cpp.llama_state_seq_get_data(self._context, _address(state), size, sequence) != size:
            raise RuntimeFailure("llama.cpp cannot save a sequence")
        return state

    def restore(self, sequence: int, state: bytes) -> bool:
        """Put a saved sequence into an empty one. False: there were not enough cells, and nothing is left of it."""
        if llama_cpp.llama_state_seq_set_data(self._context, _address(state), len(state), sequence) == len(state):
            return True
        self.forget(sequence)
        return False

    def use_threads(self, count: int) -> None:
        """Compute with `count` threads from the next `decode` on."""
        llama_cpp.llama_set_n_threads(self._context, count, count)
        self.threads = count

    def interrupt(self) -> None:
        """Make a running `decode` raise Aborted soon. May be called from any thread."""
        self._abort[0] = b"\x01"

    def clear_interrupt(self) -> None:
        self._abort[0] = b"\x00"

    def sampler(self, params: SamplingParams) -> Sampler:
        return Sampler(self._context, params, self._candidates)


_Int32 = npt.NDArray[np.int32]


def _address(state: bytes) -> Any:
    """Where the content of `state` lies, for C."""
    return ctypes.cast(ctypes.c_char_p(state), ctypes.POINTER(ctypes.c_uint8))


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
