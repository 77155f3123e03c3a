"""Appliance and AsyncAppliance: ask a confidential inference appliance, get verified answers or an exception.

with Appliance("https://host:8443", policy="policy.toml") as appliance:
    print(appliance.chat("Why is the sky blue?", model="smollm2-135m-instruct").text)
    client = appliance.openai()          # the stock openai client, talking through the same verification

An address is https://host:port, vsock://CID:port, vsock+unix:///path:port or unix:///path
(see `client_sdk.transport.addresses`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import httpx

from client_sdk.appraisal.verifier import AttestationResult
from client_sdk.client.answers import Answer, Messages, Pending, Verified, chat_body, read_answer, refusal
from client_sdk.client.embeddings import Embeddings, Inputs, embedding_body, read_verified
from client_sdk.client.streams import AnswerStream, AsyncAnswerStream, StreamReader, sdk_errors
from client_sdk.client.tokens import Tokens, detokenize_body, read_detokenized, read_tokenized, tokenize_body
from client_sdk.endorsements.files import load_directory
from client_sdk.offline.saved import save_answer
from client_sdk.policy.policy import Policy
from client_sdk.receipts.chain import Gap
from client_sdk.receipts.verify import VerifiedReceipt
from client_sdk.routes.embeddings import ROUTE_EMBEDDINGS
from client_sdk.routes.tokens import ROUTE_DETOKENIZE, ROUTE_TOKENIZE
from client_sdk.system import Surroundings, of_this_process
from client_sdk.transport.addresses import parse_appliance_address
from client_sdk.transport.httpx_transport import AsyncVerifyingTransport, VerifyingTransport
from client_sdk.transport.protocol import Judge, OnVerified, VerifiedAnswer
from client_sdk.wire.names import receipt_part

if TYPE_CHECKING:
    import openai

Save: TypeAlias = Path | str | OnVerified | None

CHAT_ROUTE = "/v1/chat/completions"
TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 30.0
RECEIPTS_KEPT = 256
_NO_KEY = "no-key-configured"
# The openai client opens websockets (realtime, responses) by itself, past its HTTP client: give them nowhere to go.
_NO_WEBSOCKETS = "refused://websockets-are-not-verified.invalid/"
_WAYS_AROUND = frozenset({"http_client", "websocket_base_url", "provider"})
_PROBE_ROUTE = "/healthz"


class _Shared(httpx.BaseTransport):
    """Lends a transport to a client that would close it."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._transport.handle_request(request)


class _AsyncShared(httpx.AsyncBaseTransport):
    """See _Shared."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)


class _Common(ABC):
    """What both clients share: addresses, credentials, the judge, the receipts of the last answers."""

    def __init__(
        self,
        url: str,
        *,
        policy: Policy | Path | str,
        api_key: str | None = None,
        save: Save = None,
        timeout_s: float = TIMEOUT_S,
        endorsements: Path | str | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        address = parse_appliance_address(url)
        check_api_key(api_key)
        self._origin, self._connector = address.origin, address.connector
        self.policy = policy if isinstance(policy, Policy) else Policy.load(policy)
        self._api_key = api_key
        self._save = save
        self._lock = threading.Lock()
        self._receipts: OrderedDict[bytes, VerifiedReceipt] = OrderedDict()
        self._judge = Judge(
            self._origin,
            self.policy,
            surroundings or of_this_process(),
            endorsements=None if endorsements is None else load_directory(Path(endorsements)),
            on_verified=self._remember,
            keep_streams=self._save is not None,
        )
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the transport and the HTTP client. Nothing connects yet."""

    def receipt_for(self, response_id: str) -> VerifiedReceipt:
        """The receipt of one of the last 256 verified answers, by the `id` of its body. Raises KeyError."""
        with self._lock:
            try:
                return self._receipts[bytes.fromhex(receipt_part(response_id))]
            except ValueError:
                raise KeyError(response_id) from None

    def receipt_gaps(self) -> tuple[Gap, ...]:
        """Places in the chains of receipts that were never seen here, between the first and the last that were."""
        return self._judge.gaps()

    def _remember(self, answer: VerifiedAnswer) -> None:
        cti = answer.receipt.claims.cti
        if isinstance(self._save, str | Path):
            save_answer(Path(self._save) / cti.hex(), answer, policy_digest=self.policy.digest)
        elif self._save is not None:
            self._save(answer)
        with self._lock:
            self._receipts[cti] = answer.receipt
            while len(self._receipts) > RECEIPTS_KEPT:
                self._receipts.popitem(last=False)

    def _headers(self) -> dict[str, str]:
        return {} if self._api_key is None else {"authorization": f"Bearer {self._api_key}"}

    def _stream_request(
        self, http: httpx.Client | httpx.AsyncClient, body: dict[str, Any], reader: StreamReader
    ) -> httpx.Request:
        request = http.build_request("POST", CHAT_ROUTE, json=body, extensions=reader.extensions())
        request.extensions["timeout"] = self._timeout.as_dict()
        return request

    def _openai_options(self, http_client: object, options: dict[str, Any]) -> dict[str, Any]:
        for name in _WAYS_AROUND & options.keys():
            raise ValueError(f"{name}: the openai client would then talk to somebody without verification")
        return {
            "base_url": f"{str(self._origin).rstrip('/')}/v1",
            "max_retries": 0,
            "api_key": self._api_key or _NO_KEY,
            **options,
            "http_client": http_client,
            "websocket_base_url": _NO_WEBSOCKETS,
        }


class Appliance(_Common):
    """A verified connection to one appliance. A context manager; methods may be called from several threads.

    `policy` is a Policy or the path of its file. `save` is a directory that gets every verified answer, each in a
    folder named after its receipt id, or a callable that gets every VerifiedAnswer. `timeout_s` bounds each wait for
    bytes. `endorsements` is a directory of what vouches for evidence that an appliance does not staple
    (docs/endorsements.md); it is read once. Every method raises VerificationError for a NO, UndecidedError for "no
    verdict", TransportError for network trouble, ApplianceError for errors that the appliance answered with, SaveError
    for an answer it could not save, RequestError for a request that cannot be sent (before anything is).
    """

    http: httpx.Client
    _transport: VerifyingTransport

    def _open(self) -> None:
        self._transport = VerifyingTransport(self._judge, connector=self._connector)
        self.http = self._client()

    def __enter__(self) -> Appliance:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._close()
        if kind is None:
            self._judge.check_chains()

    def close(self) -> None:
        """Close all connections. Raises PolicyError RECEIPT_CHAIN_GAP where the policy asks for gap-free chains."""
        self._close()
        self._judge.check_chains()

    def _close(self) -> None:
        self.http.close()
        self._transport.close()

    def attest(self) -> AttestationResult:
        """Attest the connection that the next request uses, and say what was proven."""
        with sdk_errors():
            result = self.http.get(_PROBE_ROUTE).extensions["attestation"]
        assert isinstance(result, AttestationResult)
        return result

    def chat(self, prompt: Messages, *, model: str, **params: Any) -> Answer:
        """Ask and wait for the whole, verified answer. `params` are OpenAI's (temperature, seed, max_tokens, ...)."""
        body = chat_body(prompt, model=model, stream=False, params=params)
        with sdk_errors():
            response = self.http.post(CHAT_ROUTE, json=body)
        return read_answer(*_answered(response))

    @overload
    def stream(
        self, prompt: Messages, *, model: str, pending: Literal[False] = ..., **params: Any
    ) -> AnswerStream[str]: ...

    @overload
    def stream(
        self, prompt: Messages, *, model: str, pending: Literal[True], **params: Any
    ) -> AnswerStream[Pending | Verified]: ...

    def stream(
        self, prompt: Messages, *, model: str, pending: bool = False, **params: Any
    ) -> AnswerStream[str] | AnswerStream[Pending | Verified]:
        """Ask and iterate over the verified text as it comes: pieces of text, and the receipt when it has ended.

        With `pending` the pieces are Pending(text), as it arrives and not verified, and Verified(text), later.
        """
        body = chat_body(prompt, model=model, stream=True, params=params)
        reader = StreamReader(pending=pending)
        request = self._stream_request(self.http, body, reader)
        if pending:
            return AnswerStream[Pending | Verified](self.http, request, reader, marked=True)
        return AnswerStream[str](self.http, request, reader, marked=False)

    def embed(self, inputs: Inputs, *, model: str, **params: Any) -> Embeddings:
        """Vectors for inputs, verified. `params` are OpenAI's (dimensions, encoding_format, user)."""
        body = embedding_body(inputs, model=model, params=params)
        with sdk_errors():
            response = self.http.post(ROUTE_EMBEDDINGS, json=body)
        return read_verified(*_answered(response))

    def tokenize(self, prompt: Messages, *, model: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Tokens:
        """The tokens the model sees of a raw text, or of messages and the tools they are told about; verified."""
        body = tokenize_body(prompt, model=model, tools=tools)
        with sdk_errors():
            response = self.http.post(ROUTE_TOKENIZE, json=body)
        return read_tokenized(prompt, *_answered(response))

    def detokenize(self, tokens: Sequence[int], *, model: str) -> Tokens:
        """The text of tokens, verified."""
        with sdk_errors():
            response = self.http.post(ROUTE_DETOKENIZE, json=detokenize_body(tokens, model=model))
        return read_detokenized(tokens, *_answered(response))

    def openai(self, **options: Any) -> openai.OpenAI:
        """The stock openai client through this transport (extra `openai`). No retries unless `max_retries` is given.

        What it would do past this transport (websockets) fails. Raises ValueError for options that would go around it.
        """
        import openai

        return openai.OpenAI(**self._openai_options(self._client(), options))

    def _client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self._origin,
            transport=_Shared(self._transport),
            headers=self._headers(),
            timeout=self._timeout,
            follow_redirects=False,
            trust_env=False,
        )


class AsyncAppliance(_Common):
    """See Appliance; on asyncio."""

    http: httpx.AsyncClient
    _transport: AsyncVerifyingTransport

    def _open(self) -> None:
        self._transport = AsyncVerifyingTransport(self._judge, connector=self._connector)
        self.http = self._client()

    async def __aenter__(self) -> AsyncAppliance:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self._aclose()
        if kind is None:
            self._judge.check_chains()

    async def aclose(self) -> None:
        """See Appliance.close."""
        await self._aclose()
        self._judge.check_chains()

    async def _aclose(self) -> None:
        await self.http.aclose()
        await self._transport.aclose()

    async def attest(self) -> AttestationResult:
        """See Appliance.attest."""
        with sdk_errors():
            result = (await self.http.get(_PROBE_ROUTE)).extensions["attestation"]
        assert isinstance(result, AttestationResult)
        return result

    async def chat(self, prompt: Messages, *, model: str, **params: Any) -> Answer:
        """See Appliance.chat."""
        body = chat_body(prompt, model=model, stream=False, params=params)
        with sdk_errors():
            response = await self.http.post(CHAT_ROUTE, json=body)
        return read_answer(*_answered(response))

    @overload
    def stream(
        self, prompt: Messages, *, model: str, pending: Literal[False] = ..., **params: Any
    ) -> AsyncAnswerStream[str]: ...

    @overload
    def stream(
        self, prompt: Messages, *, model: str, pending: Literal[True], **params: Any
    ) -> AsyncAnswerStream[Pending | Verified]: ...

    def stream(
        self, prompt: Messages, *, model: str, pending: bool = False, **params: Any
    ) -> AsyncAnswerStream[str] | AsyncAnswerStream[Pending | Verified]:
        """See Appliance.stream."""
        body = chat_body(prompt, model=model, stream=True, params=params)
        reader = StreamReader(pending=pending)
        request = self._stream_request(self.http, body, reader)
        if pending:
            return AsyncAnswerStream[Pending | Verified](self.http, request, reader, marked=True)
        return AsyncAnswerStream[str](self.http, request, reader, marked=False)

    async def embed(self, inputs: Inputs, *, model: str, **params: Any) -> Embeddings:
        """See Appliance.embed."""
        body = embedding_body(inputs, model=model, params=params)
        with sdk_errors():
            response = await self.http.post(ROUTE_EMBEDDINGS, json=body)
        return read_verified(*_answered(response))

    async def tokenize(
        self, prompt: Messages, *, model: str, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Tokens:
        """See Appliance.tokenize."""
        body = tokenize_body(prompt, model=model, tools=tools)
        with sdk_errors():
            response = await self.http.post(ROUTE_TOKENIZE, json=body)
        return read_tokenized(prompt, *_answered(response))

    async def detokenize(self, tokens: Sequence[int], *, model: str) -> Tokens:
        """See Appliance.detokenize."""
        with sdk_errors():
            response = await self.http.post(ROUTE_DETOKENIZE, json=detokenize_body(tokens, model=model))
        return read_detokenized(tokens, *_answered(response))

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """See Appliance.openai; the asynchronous client."""
        import openai

        return openai.AsyncOpenAI(**self._openai_options(self._client(), options))

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._origin,
            transport=_AsyncShared(self._transport),
            headers=self._headers(),
            timeout=self._timeout,
            follow_redirects=False,
            trust_env=False,
        )


def _answered(response: httpx.Response) -> tuple[bytes, VerifiedReceipt]:
    """(body, receipt) of a verified answer. Raises ApplianceError for any other status than 200."""
    if response.status_code != 200:
        raise refusal(response.status_code, response.content, verified=response.extensions["verified"])
    return response.content, response.extensions["verified_receipt"]


def check_api_key(api_key: str | None) -> None:
    """Raises ValueError, without quoting it, for a key that no header can carry: HTTP libraries would quote it."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key and " " not in api_key):
        raise ValueError("an API key is printable ASCII without blanks (a file's last newline does not belong to it)")


def parse_appliance_url(url: str) -> httpx.URL:
    """The origin of an appliance, by any of the addresses it can have. Raises ValueError for anything else."""
    return parse_appliance_address(url).origin
