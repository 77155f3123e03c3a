"""The model and the engine that a receipt asks for, of what this machine has. Every lack has a reason of its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.boot import identities
from appliance.config.settings import Config, ModelConfig
from appliance.engine.embedding.supervisor import SupervisedEmbedder
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.weights.gguf import read_facts
from appliance.errors import BootError
from appliance.models.manifest import InstalledModel
from appliance.models.store import ModelStore
from appliance.receipts.claims import Served
from appliance.replay.run import Means
from appliance.replay.saved import SavedAnswer
from appliance.replay.verdict import CannotReproduce, Reason
from client_sdk.wire import tools
from client_sdk.wire.receipt import ModelFacts, ReceiptClaims

_CHUNK_BYTES = 4 << 20
_MOST_AT_ONCE = 4
_MOST_ROWS = 4096
_SELFTEST_LIMIT_S = 300.0  # nobody waits to be served, and what is not measured leaves a difference in doubt
_MOST_THREADS_A_CORE = 4
_PORTABLE = "attested-"
_STATED_CONTEXT = (
    re.compile(rb"context holds (\d{1,9})\b"),
    re.compile(rb"has (\d{1,9}) tokens, which leaves room for (\d{1,9});"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the person who replays gives: a file or a name in the store, and what no receipt holds.

    `config` is the appliance's own configuration where it is known; its digest is then the receipt's.
    """

    model: str
    store: ModelStore
    python: str
    cores: int
    config: Config | None = None
    chat_template: Path | None = None
    threads: int | None = None
    kernels: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An engine that is still to be started, and what receipts say of it once it is."""

    engine: SupervisedEngine
    deterministic: bool

    def means(self, claimed: ModelFacts, execution: Mapping[str, object]) -> Means:
        """What to answer with. Raises CannotReproduce where what was loaded is not what the receipt names."""
        engine = self.engine
        found = identities.model_facts(claimed.name, engine.model)
        check_same_model(claimed, found.weights, found.tokenizer, found.chat_template)
        _check_chat_format(execution, engine.model.chat.digest)
        return Means(
            served=Served(model=found, engine=identities.engine_facts(engine.info)),
            engine=engine,
            embedder=engine if isinstance(engine, SupervisedEmbedder) else None,
            deterministic=self.deterministic,
        )


def prepare(saved: SavedAnswer, wanted: Wanted) -> Prepared:
    """Find the weights, check that they are the receipt's, and set an engine up as the receipt says.

    Raises CannotReproduce: weights-missing, other-weights, other-tokenizer, other-chat-template, other-configuration,
    unsupported, engine.
    """
    claims = saved.claims
    assert claims.model is not None, "asked only where the receipt names a model"
    if len(claims.model.weights) != 1:
        raise CannotReproduce(Reason.UNSUPPORTED, "the receipt's model has several weight files; one can be given")
    installed = _installed(wanted, claims.model)
    config, model = _configured(saved, wanted)
    installed = _with_template(installed, wanted, model)
    with _engine_errors():
        template = identities.chat_template_of(model, installed)
        with installed.paths[0].open("rb") as file:
            own = read_facts(file.fileno(), chat_template=template)
        check_same_model(
            claims.model, ((installed.size, installed.sha256),), own.tokenizer_digest, own.chat_template_digest
        )
        engine = identities.engine_of(config, model, installed, wanted.python)
    return Prepared(engine=engine, deterministic=_deterministic(claims, wanted))


def _deterministic(claims: ReceiptClaims, wanted: Wanted) -> bool:
    """Whether every answer of the appliance is; where its configuration is unknown, as far as this one shows."""
    if wanted.config is not None:
        return wanted.config.engine.determinism == "always"
    return claims.decoding is not None and claims.decoding["deterministic"] is True


def check_same_model(
    claimed: ModelFacts, weights: tuple[tuple[int, bytes], ...], tokenizer: bytes, chat_template: bytes | None
) -> None:
    """Raises CannotReproduce naming what is another."""
    if weights != claimed.weights:
        raise _other_weights(claimed, weights[0][1])
    if tokenizer != claimed.tokenizer:
        message = "the receipt names another tokenizer than the one that these weights have"
        raise CannotReproduce(Reason.OTHER_TOKENIZER, message)
    if chat_template != claimed.chat_template:
        wanted = "none" if claimed.chat_template is None else f"the one with SHA-256 {claimed.chat_template.hex()}"
        message = f"the receipt names another chat template: {wanted}; give its file with --chat-template"
        raise CannotReproduce(Reason.OTHER_CHAT_TEMPLATE, message)


def _check_chat_format(execution: Mapping[str, object], found: bytes) -> None:
    if execution.get(tools.FACT_CHAT_FORMAT, found) != found:
        message = (
            "the appliance reads the chat template in another way (models[].tool_format, reasoning, reasoning_tags): "
            "give its configuration with --config"
        )
        raise CannotReproduce(Reason.CONFIGURATION_UNKNOWN, message)


# -- weights -----------------------------------------------------------------------------------------------------------


def _installed(wanted: Wanted, claimed: ModelFacts) -> InstalledModel:
    path = Path(wanted.model)
    if path.is_file():
        return _from_file(path, claimed)
    if path.exists() or "/" in wanted.model:
        raise CannotReproduce(Reason.WEIGHTS_MISSING, f"{wanted.model} is no file with weights")
    try:
        installed = wanted.store.get(wanted.model)
    except BootError as error:
        message = f"--model {wanted.model}: neither a file nor an installed model ({error})"
        raise CannotReproduce(Reason.WEIGHTS_MISSING, message) from None
    if installed.sha256 != claimed.weights[0][1]:
        raise _other_weights(claimed, installed.sha256)
    return installed


def _from_file(path: Path, claimed: ModelFacts) -> InstalledModel:
    """The file, hashed: nothing looks into it before it is known to be the right one."""
    size, sha256 = claimed.weights[0]
    hasher = hashlib.sha256()
    try:
        found = path.stat().st_size
        if found != size:
            message = f"the receipt's weights have {size} bytes, {path.name} has {found}"
            raise CannotReproduce(Reason.OTHER_WEIGHTS, message)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise CannotReproduce(Reason.WEIGHTS_MISSING, f"{path.name} cannot be read ({error.strerror})") from None
    if hasher.digest() != sha256:
        raise _other_weights(claimed, hasher.digest())
    return InstalledModel(
        name=claimed.name,
        paths=(path,),
        sha256=sha256,
        size=size,
        licence="",
        source="",
        chat_template=None,
        chat_template_sha256=None,
    )


def _with_template(installed: InstalledModel, wanted: Wanted, model: ModelConfig) -> InstalledModel:
    path = wanted.chat_template
    if path is None or model.chat_template_file:
        return installed
    return replace(installed, chat_template=path, chat_template_sha256=None)


def _other_weights(claimed: ModelFacts, found: bytes) -> CannotReproduce:
    message = f"the receipt's weights have SHA-256 {claimed.weights[0][1].hex()}, the given ones {found.hex()}"
    return CannotReproduce(Reason.OTHER_WEIGHTS, message)


# -- configuration -----------------------------------------------------------------------------------------------------


def _configured(saved: SavedAnswer, wanted: Wanted) -> tuple[Config, ModelConfig]:
    """The configuration to evaluate with: the appliance's where it is given, else what the receipt says of it."""
    claims = saved.claims
    assert claims.model is not None
    if wanted.config is not None:
        if wanted.config.digest() != claims.config:
            message = (
                f"the configuration has the digest {wanted.config.digest().hex()}, the receipt names "
                f"{claims.config.hex()}"
            )
            raise CannotReproduce(Reason.OTHER_CONFIGURATION, message)
        listed = {model.name: model for model in wanted.config.models}
        model = listed.get(claims.model.name, ModelConfig(name=claims.model.name))
        model = replace(model, draft_model="", draft_file="", draft_sha256="")
        return _alone(wanted.config, wanted, claims), model
    return _alone(Config(), wanted, claims), _model_as_stated(saved)


def _alone(config: Config, wanted: Wanted, claims: ReceiptClaims) -> Config:
    """Set up for one request: nothing is reused and nothing guessed, which changes no bit and takes no time.

    An answer that is exact in its own shapes alone gets those.
    """
    execution = claims.execution or {}
    threads, rows = wanted.threads or max(1, wanted.cores - 1), config.engine.batch_tokens
    if not shapes_are_free(execution):
        rows = _number(execution, "n-batch", rows, most=_MOST_ROWS)
    if wanted.threads is None and not (shapes_are_free(execution) and is_portable(claims.engine.arithmetic)):
        threads = _number(execution, "threads", threads, most=_MOST_THREADS_A_CORE * wanted.cores)
    engine = replace(
        config.engine,
        speculation="off",
        prefix_cache_entries=0,
        determinism="always",
        slots=min(len(claims.output or ()) or 1, _MOST_AT_ONCE),
        kv_tokens="auto",
        threads=threads,
        batch_tokens=rows,
        kernels=wanted.kernels,
        selftest_limit_s=_SELFTEST_LIMIT_S,
    )
    return replace(config, engine=engine)


def _number(execution: Mapping[str, object], fact: str, default: int, *, most: int) -> int:
    value = execution.get(fact)
    return value if type(value) is int and 1 <= value <= most else default


def shapes_are_free(execution: Mapping[str, object]) -> bool:
    """Whether the appliance found every shape of evaluation exact; facts of vectors say nothing of it."""
    return all(execution.get(fact, True) is True for fact in ("exact-batch", "exact-chunk"))


def _model_as_stated(saved: SavedAnswer) -> ModelConfig:
    claims = saved.claims
    assert claims.model is not None
    execution = claims.execution or {}
    length = execution.get("context-length", _stated_context(saved))
    form = "hermes" if execution.get(tools.FACT_FORMAT) == tools.FORMAT_HERMES else "auto"
    try:
        tags = tools.tags_of(execution)
    except ValueError:
        raise CannotReproduce(Reason.DAMAGED, "the receipt's tags of reasoning are none") from None
    evaluated = claims.decoding is not None
    return ModelConfig(
        name=claims.model.name,
        context_length=length if isinstance(length, int) and 0 < length <= 1 << 24 else 0,
        pooling=claims.embedding.pooling if claims.embedding is not None else "none" if evaluated else "auto",
        tool_format=form,
        reasoning="none" if tools.FACT_CHAT_FORMAT in execution and tags is None else "auto",
        reasoning_tags=tags or (),
    )


def _stated_context(saved: SavedAnswer) -> int:
    """What the message of a refusal says the context holds: no claim of its receipt does. 0 where it does not."""
    holds, room = (pattern.search(saved.response) for pattern in _STATED_CONTEXT)
    if holds is not None:
        return int(holds[1])
    return 0 if room is None else int(room[1]) + int(room[2])


# -- engine ------------------------------------------------------------------------------------------------------------


def is_portable(arithmetic: str | None) -> bool:
    """Whether it gives the same bits on every processor; all others give theirs on the machine that computed."""
    return arithmetic is not None and arithmetic.startswith(_PORTABLE)


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except BootError as error:
        raise CannotReproduce(Reason.ENGINE, f"the model cannot be run here: {error}") from None
