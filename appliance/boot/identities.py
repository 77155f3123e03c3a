"""Facts that attestation and receipts state about models, engine and device, and the digests that people pin."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

from appliance.config.settings import Config, ModelConfig
from appliance.engine.embedding.pooling import resolve_pooling
from appliance.engine.embedding.supervisor import SupervisedEmbedder
from appliance.engine.generation.draft import DraftWeights
from appliance.engine.generation.prefix_cache import CacheLimits
from appliance.engine.host.deaths import processor_name
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings, RestartPolicy, SpeculationSettings
from appliance.engine.types import EngineInfo, LoadedModel
from appliance.engine.weights.gguf import read_facts
from appliance.engine.weights.sealed import seal_model
from appliance.errors import BootError
from appliance.models.digests import parse_sha256
from appliance.models.manifest import InstalledModel
from appliance.models.progress import Fractions
from appliance.models.store import ModelStore
from client_sdk.wire import digests
from client_sdk.wire.receipt import DeviceFacts, EngineFacts, ModelFacts

FORMAT_GGUF = "gguf"
DEFAULT_CONTEXT_LENGTH = 4096


def chat_template_of(model: ModelConfig, installed: InstalledModel) -> str | None:
    """The operator's chat template: the configuration's before the store's. None: the model's own. Raises BootError."""
    path = Path(model.chat_template_file) if model.chat_template_file else installed.chat_template
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BootError(f"chat template {path} cannot be read: {error.__class__.__name__}") from error


def draft_of(model: ModelConfig, store: ModelStore) -> DraftWeights | None:
    """The model that guesses ahead for this one; None where none is configured. Raises BootError."""
    named = [place for place in (model.draft_model, model.draft_file) if place]
    if not named and not model.draft_sha256:
        return None
    where = f"models[] {model.name!r}"
    if len(named) != 1 or not model.draft_sha256:
        raise BootError(f"{where}: a draft model takes draft_sha256 and either draft_model or draft_file")
    sha256 = parse_sha256(model.draft_sha256)
    if sha256.hex() != model.draft_sha256:  # the text is pinned: one spelling only
        raise BootError(f"{where}: draft_sha256 is to be written as 64 lower-case hex digits")
    if model.draft_file:
        path = Path(model.draft_file)
        try:
            return DraftWeights(paths=(path,), sha256=sha256, size_bytes=path.stat().st_size)
        except OSError as error:
            raise BootError(f"the draft model {path.name} cannot be read: {error.strerror}") from error
    installed = store.get(model.draft_model)
    if installed.sha256 != sha256:
        raise BootError(
            f"{where}: the draft model {installed.name!r} in the store has SHA-256 {installed.sha256.hex()}, "
            f"draft_sha256 says {sha256.hex()}"
        )
    return DraftWeights(paths=installed.paths, sha256=sha256, size_bytes=installed.size)


def engine_settings(
    config: Config, model: ModelConfig, installed: InstalledModel, python: str, draft: DraftWeights | None = None
) -> EngineSettings:
    """How to run one model. A context length that is not configured is the smaller of 4096 and the model's own."""
    template = chat_template_of(model, installed)
    context_length = model.context_length
    if not context_length:
        with installed.paths[0].open("rb") as file:  # read again, and checked, once it is sealed
            own = read_facts(file.fileno(), chat_template=template).training_context_length
        context_length = min(DEFAULT_CONTEXT_LENGTH, own)
    return EngineSettings(
        model_paths=installed.paths,
        sha256=installed.sha256,
        size_bytes=installed.size,
        worker_python=python,
        context_length=context_length,
        threads=config.engine.threads,
        n_batch=config.engine.batch_tokens,
        kernels=config.engine.kernels,
        selftest_limit_s=config.engine.selftest_limit_s,
        slots=config.engine.slots,
        kv_tokens=config.engine.kv_tokens,
        cache=CacheLimits(
            entries=config.engine.prefix_cache_entries,
            limit_bytes=config.engine.prefix_cache_mib << 20,
            ttl_s=config.engine.prefix_cache_ttl_s,
        ),
        speculation=SpeculationSettings(
            kind=config.engine.speculation,
            draft_tokens=config.engine.draft_tokens,
            adaptive=config.engine.draft_widths == "adaptive",
        ),
        draft=draft,
        deterministic=config.engine.determinism == "always",
        chat_template=template,
        pooling=model.pooling,
        reasoning=reasoning_of(model),
        template_tools=model.tool_format == "auto",
        restart=RestartPolicy(stall_s=config.engine.stall_s),
    )


def reasoning_of(model: ModelConfig) -> tuple[str, str] | Literal["auto", "none"]:
    """The configured tags around reasoning, or whether the template's own are looked for. Raises BootError."""
    tags = model.reasoning_tags
    if not tags:
        return "none" if model.reasoning == "none" else "auto"
    if len(tags) != 2 or model.reasoning == "none" or any(tag != tag.strip() or len(tag) > 64 for tag in tags):
        raise BootError(
            "models: reasoning_tags are two texts of at most 64 characters, without white space around them, and "
            'reasoning = "none" has no tags'
        )
    return tags[0], tags[1]


def engine_for(config: Config, model: ModelConfig, store: ModelStore, python: str) -> SupervisedEngine:
    """The engine that makes of this model what it is for: text or vectors. Raises BootError."""
    return engine_of(config, model, store.get(model.name), python, draft_of(model, store))


def engine_of(
    config: Config, model: ModelConfig, installed: InstalledModel, python: str, draft: DraftWeights | None = None
) -> SupervisedEngine:
    """`engine_for` a model wherever it lies. Raises BootError."""
    settings = engine_settings(config, model, installed, python, draft)
    with installed.paths[0].open("rb") as file:  # read again, and checked, once it is sealed
        pooling = resolve_pooling(model.pooling, read_facts(file.fileno(), chat_template=settings.chat_template))
    if pooling is None:
        return SupervisedEngine(settings)
    if draft is not None:
        raise BootError(f"models[] {model.name!r} makes vectors: there is nothing for a draft model to guess")
    return SupervisedEmbedder(settings)


def model_facts(name: str, loaded: LoadedModel) -> ModelFacts:
    """What receipts say about a model, its identity by content included."""
    identity = digests.model_identity(
        format_name=FORMAT_GGUF,
        weights=loaded.weights,
        tokenizer=loaded.tokenizer_digest,
        chat_template=loaded.chat_template_digest,
    )
    return ModelFacts(
        name=name,
        identity=identity,
        weights=loaded.weights,
        tokenizer=loaded.tokenizer_digest,
        chat_template=loaded.chat_template_digest,
        format=FORMAT_GGUF,
    )


def engine_facts(info: EngineInfo) -> EngineFacts:
    return EngineFacts(
        name=info.name,
        version=info.version,
        digest=digests.engine_digest(info.libraries),
        arithmetic=info.arithmetic,
        kernels=info.kernels,
    )


def device_facts() -> DeviceFacts:
    """The processor answers are computed on. Depends on the host: a fact to record, rarely one to pin."""
    facts = {
        "architecture": platform.machine(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
    }
    return DeviceFacts(kind="cpu", digest=digests.device_digest(facts))


def offline_identity(model: ModelConfig, store: ModelStore, progress: Fractions) -> bytes:
    """The identity of an installed model, hashed from its bytes, without loading the engine. Raises BootError."""
    installed = store.get(model.name)
    sealed = seal_model(
        installed.paths,
        sha256=installed.sha256,
        size_bytes=installed.size,
        progress=lambda fraction: progress(f"hash {model.name}", fraction),
    )
    try:
        facts = read_facts(sealed.fd, chat_template=chat_template_of(model, installed))
    finally:
        sealed.close()
    return digests.model_identity(
        format_name=FORMAT_GGUF,
        weights=((installed.size, installed.sha256),),
        tokenizer=facts.tokenizer_digest,
        chat_template=facts.chat_template_digest,
    )
