"""A diffusers checkpoint of a Hub repository, downloaded once: services then start offline.

FOLDER = model_index.json, <component>/<config, tokenizer and safetensors files>, and
solrl-fetch.json, which is written last: a folder that has it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined] # documented as being here
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from solrl import atomic
from solrl.errors import BusyError, InputError, UnavailableError

RECORD = "solrl-fetch.json"
#: Locked while a download runs; says whose it is, also after one that did not end.
LOCK = ".solrl-fetch.lock"
INDEX = "model_index.json"
#: Seconds the Hub may be silent, in every call.
DEADLINE = 30.0

COMMIT = re.compile(r"[0-9a-f]{40}")
SETTINGS = (".json", ".txt", ".model")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_RUNTIMES = re.compile("onnx|flax|openvino|tf_model")
#: Lists of shards: of safetensors without a variant, of anything.
SHARDS = re.compile(r"[^.]+\.safetensors\.index\.json")
ANY_SHARDS = re.compile(r".*\.index\..*json")


class Fetched(BaseModel):
    """What a folder holds; solrl-fetch.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    model: str
    revision: str
    commit: str
    files: dict[str, int]

    def whole(self, folder: Path) -> bool:
        """Whether every file is there with its size."""
        return all(_size(folder / path) == size for path, size in self.files.items())


class _File(NamedTuple):
    path: str
    size: int
    #: SHA-256 of a large file, Git's SHA-1 of any other.
    digest: str | None


def fetch(model: str, revision: str, out: Path, *, deadline: float = DEADLINE) -> Fetched:
    """Make `out` hold `model` at `revision`; without any network use when it does already.

    A download that broke off goes on where it stopped.

    Raises InputError (no such model or revision, gated, no diffusers pipeline, pickles, disk full,
    `out` holds something else), BusyError (another fetch into `out`) and UnavailableError (the Hub
    does not answer in `deadline` seconds).
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder, or one that does not exist yet")
    held = _read_record(out)
    whole = held is not None and held.model == model and held.whole(out)
    if held is not None and whole and held.commit == revision:
        return held
    if COMMIT.fullmatch(revision):
        _refuse_other(out, model, revision)
    instead = "then call again: what has come is kept"
    if held is not None and whole:
        instead = f"or ask for --revision {held.commit}, which {out} holds: that needs no network"
    with _online(), _told(model, revision, out, deadline, instead):
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=deadline)
        if info.sha is None:
            raise UnavailableError(f"{constants.ENDPOINT} names no commit of {model}: is it a Hub?")
        if info.sha != revision:
            print(
                f"warning: revision {revision!r} can move; --revision {info.sha} pins what it is "
                "now",
                file=sys.stderr,
            )
        _refuse_other(out, model, info.sha)
        if held is not None and whole:
            return held
        seen = {
            file.rfilename: _File(
                file.rfilename,
                -1 if file.size is None else file.size,
                file.blob_id if file.lfs is None else file.lfs.sha256,
            )
            for file in info.siblings or []
        }
        headers = build_hf_headers()
        url = partial(hf_hub_url, model, revision=info.sha)
        if INDEX not in seen:
            top = sorted({path.split("/")[0] for path in seen})
            raise InputError(
                f"{model} at {info.sha} is no diffusers pipeline: it has no {INDEX}, only "
                f"{', '.join(top[:8]) or 'nothing'}{' ...' if len(top) > 8 else ''}; name a "
                "repository in the diffusers format"
            )
        answer = get_session().get(url(INDEX), headers=headers, timeout=deadline)
        hf_raise_for_status(answer)
        files = [seen[path] for path in _needed(model, answer.json(), seen)]
        if any(file.size < 0 for file in files):
            raise UnavailableError(f"{constants.ENDPOINT} gives no file sizes of {model}")
        missing = [file for file in files if _size(out / file.path) != file.size]
        _check_space(out, missing)
        with _claimed(out, model, info.sha):
            _download(out, missing, lambda file: url(file.path), headers, deadline)
            fetched = Fetched(
                model=model,
                revision=revision,
                commit=info.sha,
                files={file.path: file.size for file in files},
            )
            atomic.write_text(out / RECORD, fetched.model_dump_json(indent=2) + "\n")
    return fetched


def _needed(model: str, index: Any, seen: Iterable[str]) -> list[str]:
    """The files of `seen` that a pipeline of this model_index.json is loaded from.

    Only files directly in a component's folder: never code, pickles, another runtime's weights, or
    the whole pipeline once more in a single file.
    """
    if not isinstance(index, dict):
        raise InputError(f"{INDEX} of {model} is not a JSON object; see another revision")
    needed = [INDEX]
    for part, kind in index.items():
        # [library, class]; [null, null] is a component the pipeline goes without.
        if part.isidentifier() and isinstance(kind, list) and all(kind):
            paths = [path.split("/") for path in seen]
            names = sorted(path[1] for path in paths if len(path) == 2 and path[0] == part)
            needed += [f"{part}/{name}" for name in _of_component(model, part, names)]
    return needed


def _of_component(model: str, part: str, names: list[str]) -> list[str]:
    names = [name for name in names if not OTHER_RUNTIMES.search(name)]
    weights = [name for name in names if name.endswith(".safetensors")]
    # A variant is a second dot: model.fp16.safetensors, model.fp16-00001-of-00002.safetensors.
    normal = [name for name in weights if name.count(".") == 1]
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not weights:
        raise InputError(
            f"{part}/ of {model} has only pickled weights ({', '.join(pickles)}), which can run "
            "code when loaded; name a revision or repository that has them as safetensors"
        )
    if weights and not normal:
        raise InputError(
            f"{part}/ of {model} has its weights only as a variant ({', '.join(weights)}), which "
            "services do not load; name a revision or repository that has them under plain names"
        )
    settings = [
        name
        for name in names
        if name.endswith(SETTINGS) and (SHARDS.fullmatch(name) or not ANY_SHARDS.fullmatch(name))
    ]
    return settings + normal


# --- the folder ------------------------------------------------------------------------------


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _part(path: Path) -> Path:
    """Where a file is gathered until it is whole."""
    return path.with_name(f".{path.name}.part")


def _read_record(out: Path) -> Fetched | None:
    try:
        return Fetched.model_validate_json((out / RECORD).read_bytes())
    except (FileNotFoundError, ValidationError):
        # A record nobody can read proves nothing: the files are checked against the Hub again.
        return None


def _refuse_other(out: Path, model: str, commit: str) -> None:
    """InputError when `out` holds, wholly or partly, anything but this."""
    if not out.is_dir():
        return
    record, lock = _read_record(out), out / LOCK
    held = lock.read_text().strip() if lock.exists() else ""
    if record is not None:
        held = f"{record.model} {record.commit}"
    if held and held != f"{model} {commit}":
        raise InputError(
            f"{out} holds {held}, not {model} {commit}; nothing was changed: name another folder "
            "by --out, or delete this one"
        )
    # lost+found is in every new ext4 volume.
    foreign = sorted({path.name for path in out.iterdir()} - {LOCK, "lost+found"})
    if foreign and not held:
        raise InputError(
            f"{out} holds files that are not from here ({', '.join(foreign[:5])}); nothing was "
            "changed: name an empty or a new folder by --out"
        )


@contextmanager
def _claimed(out: Path, model: str, commit: str) -> Iterator[None]:
    """`out`, made, and for this model and process alone; else BusyError or InputError."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(f"another solrl fetch writes to {out}; wait for it") from error
        _refuse_other(out, model, commit)
        file.truncate(0)
        file.write(f"{model} {commit}\n")
        file.flush()
        yield


def _check_space(out: Path, missing: Iterable[_File]) -> None:
    need = sum(file.size - (_size(_part(out / file.path)) or 0) for file in missing)
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if need > free:
        raise InputError(
            f"{out} needs {decimal(need)}, but {decimal(free)} are free there; make room, or name "
            "another place by --out"
        )


# --- the network -----------------------------------------------------------------------------


@contextmanager
def _online() -> Iterator[None]:
    """Container images set HF_HUB_OFFLINE so that no service goes online; this alone does.

    The library reads its environment when it is imported, but looks at the constant in each call.
    The other one lets it ask for nothing but the model.
    """
    before = constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_TELEMETRY = False, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_TELEMETRY = before


@contextmanager
def _told(model: str, revision: str, out: Path, deadline: float, instead: str) -> Iterator[None]:
    """Every fault of Hub, network and disk as one message with its cure."""
    hub = constants.ENDPOINT
    try:
        yield
    except HFValidationError as error:
        raise InputError(f"{model!r} is no model id: {error} Give it as OWNER/NAME") from error
    except GatedRepoError as error:
        token = "the token that is set may not read it" if get_token() else "no token is set"
        raise InputError(
            f"{model} is gated, and {token}; accept its licence on {hub}/{model}, and set HF_TOKEN "
            "to a token of that account that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(
            f"{model} has no revision {revision!r}; give a branch, a tag or a full commit hash of "
            f"{hub}/{model}"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
            token = "the token that is set may not read it" if get_token() else "HF_TOKEN is needed"
            raise InputError(
                f"{hub} shows no model {model!r} (HTTP {status}); check the name, or, if it is "
                f"private, the token: {token}"
            ) from error
        raise UnavailableError(f"{hub} answered HTTP {status}; wait a little, {instead}") from error
    except httpx2.TimeoutException as error:
        raise UnavailableError(
            f"{hub} was silent for {deadline:g} s; check the network, {instead}"
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UnavailableError(
            f"{hub} cannot be reached or broke off ({error}); check the network, HF_ENDPOINT and "
            f"proxy, {instead}"
        ) from error
    except json.JSONDecodeError as error:
        raise UnavailableError(
            f"{hub} does not answer like a Hub; check HF_ENDPOINT and the network's log-in page"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(f"the disk of {out} is full; make room, {instead}") from error


def _download(
    out: Path,
    files: list[_File],
    url: Callable[[_File], str],
    headers: Mapping[str, str],
    deadline: float,
) -> None:
    """Put each file whole into its place; a bar on a terminal, else a line a file."""
    console = Console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=sum(file.size for file in files))
        for number, file in enumerate(files, 1):
            if console.is_terminal:
                progress.update(bar, description=file.path)
            else:
                print(f"{number}/{len(files)} {file.path} ({decimal(file.size)})", flush=True)
            path = out / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            part = _part(path)
            progress.advance(bar, _size(part) or 0)
            ask = partial(_asked, url(file), headers, deadline)
            _gather(part, file.size, ask, partial(progress.advance, bar))
            if not _intact(part, file):
                part.unlink()
                raise UnavailableError(f"{file.path} arrived damaged; call again to get it anew")
            atomic.fsync_path(part)
            part.replace(path)
            atomic.fsync_path(path.parent)


@contextmanager
def _asked(
    url: str, headers: Mapping[str, str], deadline: float, start: int
) -> Iterator[httpx2.Response]:
    """The answer to GET from byte `start` on."""
    headers = {**headers, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream("GET", url, headers=headers, timeout=deadline) as answer:
        hf_raise_for_status(answer)
        yield answer


def _gather(
    part: Path,
    size: int,
    ask: Callable[[int], AbstractContextManager[httpx2.Response]],
    came: Callable[[int], None],
) -> None:
    """Append to `part` until it has `size` bytes.

    A connection that breaks is taken up again as long as each brings something.
    """
    part.open("ab").close()
    while (have := _size(part) or 0) < size:
        broken: Exception = httpx2.RemoteProtocolError("the file ended early")
        try:
            with ask(have) as answer, part.open("ab") as file:
                if have and answer.status_code != 206:
                    file.truncate(0)  # the range was ignored: this is the file from its start
                    came(-have)
                for data in answer.iter_bytes():
                    file.write(data)
                    came(len(data))
        except httpx2.TransportError as error:
            broken = error
        if (_size(part) or 0) <= have:
            raise broken


def _intact(path: Path, file: _File) -> bool:
    if _size(path) != file.size:
        return False
    if file.digest is None:
        return True
    if len(file.digest) == 64:
        return atomic.sha256_file(path) == file.digest
    blob = b"blob %d\0" % file.size + path.read_bytes()
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == file.digest
