"""The pages of the API reference: what `ddp_from_scratch` exports, from its docstrings."""

import ast
import inspect
import re
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import ddp_from_scratch as ddp
from ddp_from_scratch.core.observer import Observer

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddp_from_scratch"

# In the order of need: the names of an entry, and the page with its example. The first name is the
# entry's.
_ENTRIES: list[tuple[tuple[str, ...], str]] = [
    (("process_group", "World"), "docs/how-to/start.md"),
    (("broadcast_parameters", "broadcast_buffers"), "docs/how-to/buckets.md"),
    (("Reducer", "StragglerReport"), "README.md"),
    (("SGD", "Adam", "AdamW"), "docs/how-to/optimizers.md"),
    (("Muon",), "docs/how-to/optimizers.md"),
    (("DistributedDataParallel",), "docs/how-to/torch-ddp.md"),
    (("join", "JoinableReducer"), "docs/how-to/uneven-data.md"),
    (("comm_hooks",), "docs/how-to/comm-hooks.md"),
    (("power_sgd",), "docs/how-to/comm-hooks.md"),
    (("broadcast_optimizer_state",), "docs/how-to/checkpoints.md"),
    (("check_sync",), "docs/how-to/find-faults.md"),
    (("convert_sync_batchnorm", "SyncBatchNorm"), "docs/how-to/models.md"),
    (("start_ranks", "start_mpirun", "launcher"), "docs/how-to/start.md"),
    (("environment_without_rank",), "docs/how-to/start.md"),
    (("StopSignal",), "docs/how-to/your-loop.md"),
    (("elastic", "wait", "broadcast_state"), "docs/how-to/elastic.md"),
    (("check_ranks",), "docs/how-to/same-bits.md"),
    (("WrongResultError",), "docs/how-to/same-bits.md"),
    (("timeline",), "docs/how-to/timeline.md"),
    (
        ("UsageError", "PeerError", "CommunicationError", "is_communication_error"),
        "docs/reference.md",
    ),
]
ENTRIES = {names[0]: names for names, _ in _ENTRIES}
ENTRY_OF = {name: entry for entry, names in ENTRIES.items() for name in names}
# Of an exported class, the pages of the reference have the methods that these name. The others are
# for the rest of the package, and for observers.
_GUIDES = "".join(
    path.read_text()
    for path in [ROOT / "docs/reference.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]
    if path.name != "observers.md"
)
_EXCERPT = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):\n((?:(?: .*)?\n)+)", re.MULTILINE)
_TITLES = {"Args": "Arguments"}
_ITEM = re.compile(r"^    (\*{0,2}\w[^:]*): ", re.MULTILINE)


def pages() -> dict[str, str]:
    """Returns the page of each entry, and the page above them."""
    found = {f"api/{names[0]}.md": _entry(names, page) for names, page in _ENTRIES}
    rows = [f"- [`{n}`]({e}.md#{n.lower()}): {_summary(n)}" for n, e in ENTRY_OF.items()]
    text = "What `import ddp_from_scratch as ddp` offers, in the order in which programs need it."
    found["api/README.md"] = "\n".join(["# API\n", f"{text}\n", *rows, ""])
    return found


def _summary(name: str) -> str:
    return (inspect.getdoc(getattr(ddp, name)) or "").partition("\n")[0]


def _entry(names: tuple[str, ...], page: str) -> str:
    parts = [f"# {', '.join(names)}"]
    shown: set[type] = set()
    for name in names:
        alone = len(names) == 1
        summary, signature, *rest = _described(name, "##" if alone else "###", shown)
        example = _example(name, page) if name == names[0] else []
        parts += ["" if alone else f"## {name}", summary, signature, *example, *rest]
    return "\n\n".join(part for part in parts if part) + "\n"


def _example(name: str, page: str) -> list[str]:
    """The page's shortest excerpt that uses the name. The tests run all excerpts."""
    text = (ROOT / page).read_text()
    using = [code for code in _EXCERPT.findall(text) if re.search(rf"\b{name}\b", code)]
    return [f"From [{page}](../{page}):", f"```python\n{min(using, key=len)}```"]


def _described(name: str, level: str, shown: set[type]) -> list[str]:
    """Describes an exported function, class or module, beginning with its summary.

    `level` is that of headings inside it.
    """
    thing = inspect.unwrap(getattr(ddp, name))
    source = Path(inspect.getsourcefile(thing) or "").relative_to(ROOT)
    link = f"Source: [{source}](../{source})"
    if not isinstance(thing, ModuleType):
        return [*_of(thing, f"ddp.{name}", level, shown), link]
    parts = [*_docstring(thing), link]
    own = [
        n for n, value in vars(thing).items() if getattr(value, "__module__", 0) == thing.__name__
    ]
    for member in getattr(thing, "__all__", [n for n in own if n[0] != "_"]):
        title = f"{name}.{member}"
        parts += [f"{level} {title}", *_of(vars(thing)[member], title, f"{level}#", shown)]
    return parts


def _of(thing: Any, name: str, level: str, shown: set[type]) -> list[str]:
    """Describes a function, or a class with its methods; bases only once on a page."""
    summary, rest = _docstring(thing)
    if not inspect.isclass(thing):
        return [summary, _signature(thing, name), rest]
    parts = [summary, _signature(thing.__init__, name), rest]
    bases = [base for base in thing.__mro__ if base.__module__.startswith(PACKAGE.name)]
    for base in bases:
        if base not in shown | {thing, Observer}:
            named = f" `{base.__name__}`" if base.__name__ in ddp.__all__ else ""
            parts += [f"From its base class{named}:", *_docstring(base)]
        for member, value in vars(base).items() if base not in shown else ():
            function = value.fget if isinstance(value, property) else inspect.unwrap(value)
            public = member[0] != "_" and re.search(rf"[.`]{member}\b", _GUIDES)
            if public and getattr(thing, member) is getattr(base, member) and _is_ours(function):
                what = "" if isinstance(value, property) else _signature(function, member)
                summary, rest = _docstring(function)
                parts += [f"{level} {member}", summary, what, rest]
    shown.update(bases)
    return parts


def _is_ours(thing: Any) -> bool:
    """Says if it is a documented function of this package, and not one of torch's."""
    return bool(
        inspect.isroutine(thing)
        and (getattr(thing, "__module__", None) or "").startswith(PACKAGE.name)
        and thing.__doc__
    )


def _signature(function: Any, name: str) -> str:
    """The head of a function as its source has it; "" if the source has none."""
    try:
        source = dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    head = "\n".join(source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1])
    head = re.sub(r" *# noqa.*", "", head)
    head = re.sub(r"^def \w+", name, head)
    head = re.sub(r"\((\s*)self(, |,\s+|(?=\)))", r"(\1", head)
    return f"```python\n{re.sub(r'( -> None)?:$', '', head)}\n```"


def _docstring(thing: Any) -> tuple[str, str]:
    """A docstring's first paragraph, and the others, as Markdown: its lists become lists."""
    summary, _, rest = (inspect.getdoc(thing) or "").partition("\n\n")
    return summary, _SECTION.sub(_section, f"{rest}\n").strip()


def _section(section: re.Match[str]) -> str:
    title, body = section[1], section[2].rstrip("\n") + "\n"
    if title in ("Returns", "Yields"):
        return f"**{title}** {dedent(body).strip()}\n\n"
    items = _ITEM.sub(r"- `\1`: ", re.sub(r"^ {8}", "  ", body, flags=re.MULTILINE))
    return f"**{_TITLES.get(title, title)}**\n\n{items}\n"
