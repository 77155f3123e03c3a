"""The whole build, step by step, in an empty folder. The same lock, sources and model give the same bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from image.build import chroot as chroots
from image.build import compiled, contents, disks, fetch, initrd, sbom, tree, uki
from image.build.chroot import Chroot
from image.build.errors import BuildError
from image.build.lock import Lock
from image.init import cmdline, service

ATTESTERS: Final = ("auto", "tpm2")
"""One unified kernel image for each: who attests is in its measured command line."""
_NATIVE: Final = "native/llama_cpp"
_OWN: Final = "image/build"
_OWN_FILES: Final = ("appliance.toml", "firmware_log.sh", "init.sh")
_GROUPS: Final = ("tools", "root", "kernel", "wheels", "build")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`out` is replaced as a whole; `tools` keeps what may be used again; `store` is a model store with `model`.

    The code is that of `commit` in `project`. `environ` is the caller's: for apt and pip, never for what makes bytes.
    """

    project: Path
    commit: str
    out: Path
    tools: Path
    store: Path
    model: str
    environ: Mapping[str, str]
    say: Callable[[str], None]
    monotonic: Callable[[], float] = time.monotonic


def build(lock: Lock, job: Job) -> None:
    """Make everything of the image in `job.out`. Raises BuildError; then `out` is as it was."""
    inputs = lock.group(*_GROUPS)
    fetch.fetch(lock, inputs, environ=job.environ, say=job.say)
    work = job.out.with_name(f".{job.out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    started = job.monotonic()

    def step(text: str) -> None:
        job.say(f"[{job.monotonic() - started:6.1f} s] {text}")

    step("tools chroot")
    tools = lock.group("tools")
    chroot = chroots.prepare(tools, tools=job.tools, source_date_epoch=lock.source_date_epoch)
    step("compiled packages")
    wheels = compiled.compile_wheels(chroot, (tools, lock.group("build")), native(job), keep=job.tools, say=job.say)
    step("root file system")
    _root(lock, job, chroot, sorted(wheels.glob("*.whl")), work)
    step("root disk")
    root = disks.make(chroot, work / "root.tar", work / "root.img", uuid=disks.ROOT_UUID, compress=True)
    installed = sum(path.lstat().st_size for path in (work / "root").rglob("*") if path.is_file())
    job.say(
        f"           {installed / 1e6:.1f} MB in files, {(work / 'root.img').stat().st_size / 1e6:.1f} MB as a disk"
    )
    step("model disk")
    model = model_disk(job.store, job.model, chroot, work)
    step("kernel, initrd, unified kernel images")
    _boot(lock, job, chroot, (root, model), work)
    step("reference values of the model, list of contents")
    _facts(job, chroot, work)
    sbom.write(lock, sorted(wheels.glob("*.whl")), _own(job), work)
    _digests(work)
    shutil.rmtree(job.out, ignore_errors=True)
    work.rename(job.out)
    step(f"done: {job.out}")


def native(job: Job) -> dict[str, bytes]:
    """What the project adds to llama.cpp, as it is in the commit, by file name. Raises BuildError."""
    return {Path(path).name: content for path, content in tree.committed(job.project, job.commit, [_NATIVE]).items()}


def own_file(job: Job, name: str) -> bytes:
    """A file beside this one that becomes part of the image, as it is in the commit. Raises BuildError."""
    path = f"{_OWN}/{name}"
    return tree.committed(job.project, job.commit, [path])[path]


def _root(lock: Lock, job: Job, chroot: Chroot, compiled_wheels: Sequence[Path], work: Path) -> None:
    config = own_file(job, "appliance.toml")
    (work / "appliance.toml").write_bytes(config)
    wheels = [one.cached() for one in contents.wheels(lock)]
    licences = {f"usr/share/doc/{one.name}/copyright": sbom.copyright_file(one) for one in sbom.booted(lock)}
    parts = tree.Parts(
        debs=lock.group("root"),
        wheels=(*wheels, *compiled_wheels),
        project=job.project,
        commit=job.commit,
        files=tree.etc(config, str(lock.source_date_epoch)) | {name: text for name, text in licences.items() if text},
    )
    folder = work / "root"
    tree.make(parts, folder, chroot)
    tree.pack(folder, work / "root.tar", mtime=lock.source_date_epoch)


def model_disk(store: Path, model: str, chroot: Chroot, work: Path) -> disks.Disk:
    """A model store with one model of `store`: the folder `work`/model, and it as its own disk. Raises BuildError."""
    manifest = store / "manifests" / f"{model}.json"
    if not manifest.is_file():
        raise BuildError(f"the model store {store} has no {model}: appliance models pull {model}")
    described = json.loads(manifest.read_text(encoding="utf-8"))
    folder = work / "model"
    for part in ("blobs", "manifests"):
        (folder / part).mkdir(parents=True)
    shutil.copyfile(manifest, folder / "manifests" / manifest.name)
    names = [f"{described['sha256']}.gguf"]
    if described["chat_template_sha256"]:
        names.append(f"{described['chat_template_sha256']}.jinja")
    for name in names:
        content = (store / "blobs" / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != name.split(".", 1)[0]:
            raise BuildError(f"the model store's {name} has other bytes: appliance models verify {model}")
        (folder / "blobs" / name).write_bytes(content)
    tree.pack(folder, work / "model.tar", mtime=int(chroot.environ["SOURCE_DATE_EPOCH"]))
    disk = disks.make(chroot, work / "model.tar", work / "model.img", uuid=disks.MODEL_UUID, compress=False)
    (work / "model.tar").unlink()
    return disk


def reference_values(inside: Chroot, attester: str, model: str) -> bytes:
    """What callers pin of model and configuration, said by the image's own code in its own root. Raises BuildError."""
    command = [str(tree.INTERPRETER), "-I", "-B", "-m", "appliance", "reference-values", "--config", service.CONFIG]
    return inside.run([*command, "--attester", attester, "--model", model, "--listen", "0.0.0.0:8443"])


def _boot(lock: Lock, job: Job, chroot: Chroot, found: tuple[disks.Disk, disks.Disk], work: Path) -> None:
    (kernel_deb,) = lock.group("kernel")
    kernel = work / "kernel"
    release = initrd.unpack_kernel(kernel_deb, kernel)
    shutil.copyfile(kernel / "boot" / f"vmlinuz-{release}", work / "vmlinuz")
    for name, script in (("initrd", "init.sh"), ("firmware-log-initrd", "firmware_log.sh")):
        text = own_file(job, script).decode()
        text = text.replace("@ROOT_UUID@", disks.ROOT_UUID.replace("-", ""))
        text = text.replace("@MODEL_UUID@", disks.MODEL_UUID.replace("-", ""))
        content = initrd.make(chroot, kernel, release, text.encode())
        (work / f"{name}.img").write_bytes(chroot.run(["zstd", "-q", "-19", "-T1", "-c"], stdin=content))
    shutil.rmtree(kernel)
    boot = uki.Boot(folder=work, kernel="vmlinuz", initrd="initrd.img", release=release)
    root, model = found
    for attester in ATTESTERS:
        options = cmdline.Options(
            attester=attester,
            root_hash=root.root_hash,
            root_blocks=root.blocks,
            model_hash=model.root_hash,
            model_blocks=model.blocks,
        )
        image = uki.make(chroot, boot, cmdline.render(options), f"appliance-{attester}")
        uki.make_disk(chroot, image, work / f"boot-{attester}.img")
    log = uki.Boot(folder=work, kernel="vmlinuz", initrd="firmware-log-initrd.img", release=release)
    image = uki.make(chroot, log, " ".join(cmdline.FIXED), "firmware-log")
    uki.make_disk(chroot, image, work / "boot-firmware-log.img")


def _facts(job: Job, chroot: Chroot, work: Path) -> None:
    """What callers pin of model and configuration, for each image: by the image's own code, from its own bytes."""
    inside = replace(chroot, root=work / "root", binds={"/srv/models": work / "model"})
    for attester in ATTESTERS:
        (work / f"models-{attester}.toml").write_bytes(reference_values(inside, attester, job.model))
    shutil.rmtree(work / "root")
    shutil.rmtree(work / "model")


def _own(job: Job) -> tuple[sbom.Component, sbom.Component]:
    """The project's code and the model, for the list of contents: both are in no lock."""
    paths = [*tree.PROJECT, _NATIVE]
    paths += [f"{_OWN}/{name}" for name in _OWN_FILES]
    files = tree.committed(job.project, job.commit, paths)
    pyproject = tree.committed(job.project, job.commit, ["pyproject.toml"])["pyproject.toml"]
    manifest = json.loads((job.store / "manifests" / f"{job.model}.json").read_text(encoding="utf-8"))
    return sbom.project(pyproject, files), sbom.model(manifest)


def _digests(work: Path) -> None:
    """SHA256SUMS, as sha256sum writes it, over everything."""
    names = sorted(path.name for path in work.iterdir())
    lines = [f"{hashlib.sha256((work / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (work / "SHA256SUMS").write_text("".join(lines), encoding="ascii")
