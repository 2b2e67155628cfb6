# SPDX-License-Identifier: Apache-2.0
"""Loading of models by name: the bundled one, a folder or a hub id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.errors import KvfoldError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = "bundled"
PATIENCE = 10.0  # seconds for a hub's first answer
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Loading:
    """Options for loading a model; picklable, so that another process can load the same one.

    Args:
        dtype: of the weights; "auto" is the checkpoint's own.
        device: "cpu", "cuda:1"; None is the first GPU, or the CPU where there is none.
        device_map: placement of layers for `from_pretrained`, such as "auto"; excludes `device`.
        attn_implementation: "sdpa", "eager", ...; None is the model's own default.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run model code that comes with the checkpoint.
        gguf_file: the GGUF file in the folder or hub repository.
        adapter: a PEFT adapter to load into the model: a folder or hub id.

    Raises KvfoldError for an unknown dtype, for `device` with `device_map`, and for "meta".
    """

    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    gguf_file: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise KvfoldError(f"unknown dtype {self.dtype!r}: choose {', '.join(DTYPES)}")
        if self.device is not None and self.device_map is not None:
            raise KvfoldError("a device map says where each layer goes: leave out the device")
        if "meta" in (self.device, self.device_map):
            raise KvfoldError("a model on the device meta has no weights: choose another device")

    def of_files(self) -> dict[str, Any]:
        """Options of `from_pretrained` for both model and tokenizer."""
        # Always given: without a value transformers prompts at the terminal.
        common: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            common["revision"] = self.revision
        if self.gguf_file is not None:
            common["gguf_file"] = self.gguf_file
        return common

    def of_model(self) -> dict[str, Any]:
        """Options of `from_pretrained` for the model alone, without those that are None."""
        chosen = {
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "device_map": self.device_map,
        }
        return {name: value for name, value in chosen.items() if value is not None}

    def of_worker(self, number: int) -> Loading:
        """Options of one of several processes, which take the machine's GPUs in turn."""
        import torch

        gpus = torch.cuda.device_count()
        if gpus < 2 or self.device is not None or self.device_map is not None:
            return self
        return replace(self, device=f"cuda:{number % gpus}")


def load(
    name: str, loading: Loading | None = None, *, among_ranks: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model `name` in eval mode, and its tokenizer.

    With `among_ranks`, the processes that torchrun started share the model by tensor parallelism;
    else each loads all of it. Raises KvfoldError if there is no such model, or it cannot be loaded
    with these options.
    """
    given, (name, how) = name, _with_gguf(name, loading or Loading())
    check_name(name, how)
    check_reachable(name, how.revision)
    if how.adapter is not None:
        check_reachable(how.adapter)
    from kvfold.hf.versions import parallel_options

    shared = parallel_options() if among_ranks else {}
    if shared and (how.device or how.device_map):
        raise KvfoldError("ranks share a model over their own devices: leave out the device")
    with _named(given):
        model, tokenizer = _from_pretrained(name, how, shared)
        if how.adapter is not None:
            model.load_adapter(how.adapter)
        if not shared and how.device_map is None:
            # Type checkers see transformers' wrapper of `to`, not its signature.
            model.to(device_or_usual(how.device))  # type: ignore[arg-type]
    return model.eval(), tokenizer


def load_tokenizer(name: str, loading: Loading | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name` alone; raises KvfoldError as `load`."""
    given, (name, how) = name, _with_gguf(name, loading or Loading())
    check_name(name, how)
    check_reachable(name, how.revision)
    from transformers import AutoTokenizer

    from kvfold.bundled import FOLDER

    with _named(given):
        return AutoTokenizer.from_pretrained(FOLDER if name == BUNDLED else name, **how.of_files())


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Makes a KvfoldError of any error, one line that names the model."""
    try:
        yield
    except KvfoldError:
        raise
    # Damaged files raise errors of many libraries.
    except Exception as problem:
        first_line = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise KvfoldError(f"cannot load {name!r}: {first_line}") from problem


def shown_name(name: str) -> str:
    """The name of a model, of a folder its last part."""
    return Path(name).name if Path(name).is_dir() else name


def check_name(name: str, loading: Loading) -> None:
    """Raises KvfoldError for a model or adapter that cannot exist; loads and downloads nothing."""
    if not name.strip():
        raise KvfoldError('the model\'s name is empty: give a folder, a hub id, or "bundled"')
    name, loading = _with_gguf(name, loading)
    own = loading.revision or loading.gguf_file or loading.trust_remote_code
    if name == BUNDLED and own:
        raise KvfoldError("the bundled model has one revision and no code or GGUF file of its own")
    if name != BUNDLED:
        _check_place(name, "model")
    folder = Path(name)
    if loading.gguf_file is not None and folder.is_dir():
        if not (folder / loading.gguf_file).is_file():
            raise KvfoldError(f"there is no file {loading.gguf_file} in {name}")
    elif folder.is_dir() and name != BUNDLED and not _holds_model(folder):
        found = next(iter(sorted(folder.glob("*.gguf"))), None)
        remedy = "" if found is None else f"; for its GGUF file name {str(found)!r}"
        raise KvfoldError(
            f"cannot load {name!r}: the folder holds no model, config.json is missing{remedy}"
        )
    if loading.adapter is not None:
        _check_place(loading.adapter, "adapter")


def check_reachable(name: str, revision: str | None = None) -> None:
    """Raises KvfoldError for a hub id that no cache holds, while the hub does not answer.

    Loading it would ask again and again, for a minute.
    """
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    if name == BUNDLED or Path(name).is_dir() or constants.HF_HUB_OFFLINE:
        return
    cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    if cache.is_dir():
        return
    try:
        get_session().head(hf_hub_url(name, "config.json", revision=revision), timeout=PATIENCE)
    # Errors of the library that huggingface_hub asks with, which changes with its versions.
    except Exception as problem:
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise KvfoldError(
            f"cannot load {name!r}: there is no such folder, it was not downloaded before, and the "
            f"hub does not answer ({reason}): check the name{_near(name)}"
        ) from problem


def _with_gguf(name: str, loading: Loading) -> tuple[str, Loading]:
    """The folder of a GGUF file that is given as the model, with the option that names the file."""
    path = Path(name)
    if path.suffix.lower() != ".gguf" or not path.is_file() or loading.gguf_file is not None:
        return name, loading
    return str(path.parent), replace(loading, gguf_file=path.name)


def _check_place(name: str, what: str) -> None:
    """Raises KvfoldError for a name that is neither a folder nor a valid hub id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    path = Path(name)
    if path.is_dir():
        return
    if path.is_file():
        raise KvfoldError(f"cannot load {name!r}: a file; name the folder that holds the {what}")
    # A name in a folder that is here is no hub id.
    if path.suffix.lower() == ".gguf" and path.parent.is_dir():
        raise KvfoldError(f"cannot load {name!r}: there is no such file{_near(name)}")
    try:
        validate_repo_id(name)
    except HFValidationError as problem:
        raise KvfoldError(
            f"cannot load {name!r}: there is no such folder{_near(name)}"
        ) from problem


def _near(name: str) -> str:
    """Words on a name that is nearly that of a model beside it, or the bundled one's."""
    path = Path(name)
    with suppress(OSError, ValueError):
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        models = {each.stem: each for each in beside if _is_model(each)}
        if near := get_close_matches(path.stem, models, n=1):
            return f"; did you mean {str(models[near[0]])!r}?"
        if get_close_matches(name.lower(), [BUNDLED]):
            return f"; did you mean {BUNDLED!r}?"
    return ""


def _is_model(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" or _holds_model(path)


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _from_pretrained(
    name: str, loading: Loading, shared: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvfold.bundled import bundled_model

    options = loading.of_model() | shared
    if name == BUNDLED:
        if loading.dtype == "auto":
            del options["dtype"]
        return bundled_model(**options)
    common = loading.of_files()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **common)
        return AutoModelForCausalLM.from_pretrained(name, **common, **options), tokenizer
    except OSError as problem:
        if Path(name).is_dir():
            raise
        first_line = str(problem).strip().partition("\n")[0]
        raise KvfoldError(
            f"cannot load {name!r}: there is no such folder, and from the hub: "
            f"{first_line}{_near(name)}"
        ) from problem


def device_or_usual(device: str | None) -> str:
    """The device; without one the first GPU, or the CPU where there is none."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")
