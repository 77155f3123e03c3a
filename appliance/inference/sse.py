"""Writes one server-sent event stream: frames, checkpoints, the receipt, and padding that hides token lengths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from appliance.receipts.issuer import Issuer
from appliance.receipts.transcript import StreamTranscript
from client_sdk.wire import names
from client_sdk.wire.stream import comment, encode_base64url

_MIN_PADDING_BYTES = len(names.COMMENT_PADDING) + 2


class StreamWriter:
    """`send` hands bytes to the transport; `padding_bytes` is the multiple every write is padded to (0: none).

    Record sizes on the network would otherwise tell the lengths of the tokens (docs/receipt-format.md, streams).
    """

    def __init__(
        self,
        *,
        send: Callable[[bytes], Awaitable[None]],
        transcript: StreamTranscript,
        issuer: Issuer,
        salt: bytes,
        random_bytes: Callable[[int], bytes],
        padding_bytes: int,
    ) -> None:
        self._send = send
        self.transcript = transcript
        self._issuer = issuer
        self._salt = salt
        self._random_bytes = random_bytes
        self._padding_bytes = padding_bytes

    async def frames(self, *frames: bytes) -> None:
        """Send frames in one write, with the checkpoint that has become due."""
        parts = []
        for frame in frames:
            self.transcript.add_frame(frame)
            parts.append(frame)
            if self.transcript.checkpoint_due:
                parts.append(self._checkpoint())
        await self._write(parts)

    async def checkpoint(self) -> None:
        """Send the checkpoint alone: its time has come before the next frame."""
        await self._write([self._checkpoint()])

    async def last(self, receipt: bytes, *, done: bool) -> None:
        """Send the receipt, and `[DONE]` where the answer is complete. Every frame has been sent before."""
        parts = [comment(names.COMMENT_RECEIPT, receipt)]
        if done:
            parts.append(names.DONE_BLOCK)
        await self._write(parts)

    def _checkpoint(self) -> bytes:
        signed = self._issuer.sign_checkpoint(self.transcript.take_checkpoint(), self._salt)
        return comment(names.COMMENT_CHECKPOINT, signed)

    async def _write(self, parts: list[bytes]) -> None:
        data = b"".join(parts)
        if not self._padding_bytes:
            await self._send(data)
            return
        padding = self._padding(len(data))
        # Before [DONE]: many clients stop reading there.
        if data.endswith(names.DONE_BLOCK):
            data = data[: -len(names.DONE_BLOCK)] + padding + names.DONE_BLOCK
        else:
            data += padding
        await self._send(data)

    def _padding(self, length: int) -> bytes:
        missing = -length % self._padding_bytes
        if not missing:
            return b""
        while missing < _MIN_PADDING_BYTES:
            missing += self._padding_bytes
        fill = missing - _MIN_PADDING_BYTES
        return names.COMMENT_PADDING + encode_base64url(self._random_bytes(fill))[:fill] + b"\n\n"
