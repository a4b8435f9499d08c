"""What the documents name exists: options, files, links, tests, functions, signatures."""

import importlib.util
import inspect
import json
import re
from pathlib import Path
from statistics import fmean, median, stdev

import pytest

import ddp_from_scratch
from ddp_from_scratch.bench.results import Run, Samples
from ddp_from_scratch.training.main import make_parser
from tests.support.pages import PAGES, TUTORIAL_PAGES, anchors, excerpts, links, name_of, prose
from tests.support.ranks import ROOT

PACKAGE = Path(ddp_from_scratch.__file__).parent
MAKEFILE, HOW_IT_WORKS, REFERENCE = (
    (ROOT / name).read_text() for name in ("Makefile", "docs/how-it-works.md", "docs/reference.md")
)
TEXT = {name_of(page): page.read_text() for page in PAGES}
GIVEN = {"example.py"}  # a file that the reader makes


def section(text, title):
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def source_of(*folders):
    return "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))


def differs(name, shown):
    """Says if names, order, defaults or what is given by name differ; `...` stands for others."""
    by_position, by_name = [], []
    for parameter in inspect.signature(getattr(ddp_from_scratch, name)).parameters.values():
        default = parameter.default
        text = "" if default is parameter.empty else f"={_short(default)}"
        of_kind = by_name if parameter.kind is parameter.KEYWORD_ONLY else by_position
        of_kind.append(parameter.name + text)
    parts = shown.split(", ")
    if "..." not in parts:
        return parts != by_position + ["*"] * bool(by_name) + by_name
    before, behind = parts[: parts.index("...")], parts[parts.index("...") + 1 :]
    others = {part.split("=")[0] for part in behind} - {part.split("=")[0] for part in by_name}
    if "*" in before:
        star = before.index("*")
        named = [part for part in by_name if part in before]
        return before[:star] != by_position or before[star + 1 :] != named or others
    return others or ("args" not in by_position and before != by_position[: len(before)])


def _short(default):
    return f"{default:g}" if isinstance(default, float) else repr(default)


def test_every_page_begins_with_its_title():
    assert [name for name, text in TEXT.items() if not text.startswith("# ")] == []


def test_signatures_in_the_table_are_those_of_the_code():
    shown = re.findall(r"^\| \[`(\w+)\((.*?)\)`\]", REFERENCE, re.MULTILINE)
    assert {"process_group", "Reducer", "check_sync", "SGD"} <= {name for name, _ in shown}
    assert [signature for signature in shown if differs(*signature)] == []


def test_every_public_name_and_option_is_in_the_reference():
    assert [name for name in ddp_from_scratch.__all__ if f"`{name}" not in REFERENCE] == []
    table = section(REFERENCE, "Options of Reducer")
    shown = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(shown) == sorted(inspect.signature(ddp_from_scratch.Reducer).parameters)


BENCH = ROOT / "ddp_from_scratch" / "bench"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
RUN_PY = {*make_parser()._option_string_actions} - {"-h", "--help"}
OF_OTHERS = {
    "horovodrun": {"--min-np", "--max-np"},
    "torchrun": {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}
    | {"--no-python", "--tee", "--local-ranks-filter"},
    "mpirun": {"--oversubscribe", "--mca", "--host", "--bind-to", "--allow-run-as-root"}
    | {"--stdin"},
    "Slurm": {"--mpi", "--ntasks", "--signal", "--requeue", "--open-mode", "--job-name", "--time"}
    | {"--output", "--gpus-per-task", "--gpus-per-node", "--cpus-per-task", "--cpu-bind"}
    | {"--nodes", "--ntasks-per-node"},
    "docker": {"--ipc", "--shm-size"},
    "pip, py-spy": {"--no-binary", "--editable", "--group", "--index-url", "--pid"},
    "kubectl": {"--from-literal"},
    "tutorials": {"--nodes", "--gpus", "--nr"},
}


def test_every_option_named_is_one_of_a_program():
    programs = ROOT / "benchmarks", ROOT / "examples", ROOT / "tests" / "support", BENCH
    source = MAKEFILE + source_of(*programs)
    source += (ROOT / "tests" / "conftest.py").read_text()
    known = RUN_PY.union({"--help"}, re.findall(r"--[a-z][a-z-]+", source), *OF_OTHERS.values())
    named = {(name, option) for name, text in TEXT.items() for option in OPTION.findall(text)}
    assert {(name, option) for name, option in named if option not in known} == set()


def test_every_option_of_run_py_is_in_the_reference():
    shown = set(re.findall(r"`(--[a-z-]+)`", section(REFERENCE, "run.py")))
    # Defaults, of which the other form is of use.
    assert shown - {"--help"} == RUN_PY


def test_every_make_target_and_module_named_is_there():
    text = "\n".join(TEXT.values())
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    modules = {name.removesuffix(".NAME") for name in re.findall(r"python -m ([\w.]+)", text)}
    modules |= {"ddp_from_scratch.__main__"}
    modules -= {"pip", "coverage"}  # which environments of uv and of other groups do not have
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_every_environment_variable_named_is_read_or_set():
    source = source_of(PACKAGE)
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", section(REFERENCE, "Environment variables")))
    assert "DDP_SECRET" in named
    missing = {name for name in named if name not in source and name.rstrip("12") not in source}
    assert missing == set()
    assert set(re.findall(r'"(DDP_[A-Z0-9_]*[A-Z0-9])"', source)) <= named


def test_every_file_named_is_there():
    folders = [PACKAGE, ROOT / "benchmarks", ROOT / "tests", ROOT / "tutorial"]
    for page in PAGES:
        for name in set(re.findall(r"`([\w/]+\.py)[`,]", prose(page))) - GIVEN:
            found = (ROOT / name).exists() or any(any(folder.rglob(name)) for folder in folders)
            assert found, f"{name_of(page)}: {name}"
    for excerpt in excerpts("") + excerpts("bash"):
        for file in re.findall(r"(?:python|torchrun\b.*?) ([\w/]+\.py)", excerpt.code):
            assert file in GIVEN or (ROOT / file).exists(), f"{excerpt}: {file}"


def test_every_link_leads_somewhere():
    for page in PAGES + TUTORIAL_PAGES:
        for path, anchor in links(page):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{name_of(page)}: {path}"
            assert not anchor or anchor in anchors(target), f"{name_of(page)}: {path}#{anchor}"


def test_the_documents_list_every_page_and_room():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / path).resolve() for path, _ in links(index)}
    assert {page for page in PAGES if index.parent in page.parents} <= linked | {index}
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    listed = re.findall(r"^\| \[ddp_from_scratch/(\w+)\]", HOW_IT_WORKS, re.MULTILINE)
    assert set(listed) == rooms


def test_the_files_that_the_glossary_names_have_its_words():
    rows = re.findall(r"^\| (.+) \| .+ \| `(.+)` \|$", TEXT["docs/glossary.md"], re.MULTILINE)
    assert len(rows) > 40
    for term, file in rows:
        words = "[-_ ]?".join(re.split("[- ]", term))  # also as a name: `LaunchOrder`, `local_rank`
        assert re.search(words, (PACKAGE / file).read_text(), re.IGNORECASE), term


def test_every_test_named_is_there():
    named = set(re.findall(r"`(test_\w+)`", section(REFERENCE, "Comparison with other libraries")))
    there = source_of(ROOT / "tests")
    assert len(named) > 20
    assert {name for name in named if f"def {name}(" not in there} == set()


def test_the_path_of_a_gradient_is_where_the_map_says():
    steps = re.findall(r"^\| \*\*(\w+)\*\* \| .* \| (.*?) \| (.*?) \|$", HOW_IT_WORKS, re.MULTILINE)
    assert [step for step, _, _ in steps] == ["ready", "pack", "launch", "wait", "unpack"]
    for _, files, functions in steps:
        sources = "".join((PACKAGE / f).read_text() for f in re.findall(r"`([\w/.]+)`", files))
        for function in re.findall(r"`(\w+)`", functions):
            assert f"def {function}(" in sources, function
    named = re.findall(r"\(`(\w+)`\s+in\s+`([\w/]+\.py)`\)", HOW_IT_WORKS)
    assert len(named) >= 2
    for name, file in named:
        assert re.search(rf"(def|class) {name}\b", (PACKAGE / file).read_text()), name


# The ratios of these pages are those of the files in benchmarks/results.
ON_CPU = "torch DDP on node, views|Reducer on gloo, views|ddp.SGD on gloo|" + (
    "ddp.SGD on gloo, shard=node, fuse_wgrad"
)
ON_GPU = "Reducer on nccl, views|ddp.SGD on nccl|ddp.SGD on nccl, one flat bucket|no communication"
BENCHMARKS, GPU = "benchmarks/README.md", "docs/how-to/gpu.md"
ON_BOTH = {"MLP, batch 16": "mlp", "ResNet-18": "resnet18", "transformer": "transformer"}
ROWS = [
    (page, label, f"{name}-gloo+mpi-2", ON_CPU)
    for page in ("README.md", BENCHMARKS)
    for label, name in (ON_BOTH | {"small MLP, 0.5 MB": "small", "500 layers": "layers500"}).items()
]
ROWS += [
    (BENCHMARKS, "the same, 4 ranks on 2 cores", "mlp-gloo+mpi-4", ON_CPU),
    (BENCHMARKS, "the same, AdamW", "mlp-gloo+mpi-2-adamw", ON_CPU.replace("SGD", "AdamW")),
    (BENCHMARKS, "MLP, batch 64", "mlp64-gloo+mpi-2", ON_CPU),
    (GPU, "MLP, batch 16", "mlp-nccl-1", ON_GPU),
    (GPU, "transformer, 2 x 64 tokens", "transformer-nccl-1", ON_GPU),
    (GPU, "ResNet-50, batch 4", "resnet50-nccl-1", ON_GPU),
    (GPU, "GPT-2, 4 x 512 tokens", "gpt2-nccl-1", ON_GPU),
]


@pytest.mark.parametrize(("page", "label", "file", "contenders"), ROWS)
def test_ratios_are_those_of_the_results(page, label, file, contenders):
    content = json.loads((ROOT / f"benchmarks/results/step_time-{file}.json").read_text())
    run = Run([Samples(**sample) for sample in content["samples"]])
    (row,) = [x for x in (ROOT / page).read_text().splitlines() if x.startswith(f"| {label} |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    by_name = {sample.name: sample for sample in run.samples}
    found = [run.ratio(by_name[name], run.torch_ddp) for name in contenders.split("|")]
    texts = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in found]
    if page == BENCHMARKS:
        texts.append(f"{run.ratio(by_name[contenders.split('|')[-1]], run.alone)[0]:.2f}")
    elif page != "README.md":
        texts.insert(0, f"{run.torch_ddp.quartiles[1]:.1f}")
    assert len(cells) == len(texts)
    for cell, text in zip(cells, texts, strict=True):
        assert cell in (text, text.partition(" (")[0])  # some leave out the interval


def test_the_drill_of_the_readme_is_that_of_the_results():
    content = json.loads((ROOT / "benchmarks/results/drill.json").read_text())
    followed = " ".join(sample["followed"] for sample in content["samples"])
    *first, last = re.findall(r"4 ranks after ([\d.]+) s", followed)
    told = f"Four ranks train again after {', '.join(first)} and {last} s"
    assert told in " ".join((ROOT / "README.md").read_text().split())


def test_a_recheck_costs_what_the_page_says():
    content = json.loads((ROOT / "benchmarks/results/virtual-ranks-mlp-gloo-2.json").read_text())
    means = {each["name"]: fmean(each["milliseconds"]) for each in content["samples"]}
    plain = "4 virtual ranks"
    first, *others = [means[f"{plain}, recheck_every={n}"] / means[plain] for n in (1, 10, 100)]
    told = "took {:.2f} times as long on average with `recheck_every=1`, {:.2f} times with 10"
    told = told.format(first, others[0]) + f" and {others[1]:.2f} times with 100"
    (page,) = [page for page in PAGES if page.name == "same-bits.md"]
    assert told in " ".join(page.read_text().split())


def test_models_learn_with_8_bits_what_the_page_says():
    content = json.loads((ROOT / "benchmarks/results/compression-gloo-2.json").read_text())
    (page,) = [page for page in PAGES if page.name == "comm-hooks.md"]
    text = " ".join(page.read_text().split())
    models, sent = ("digits", "gpt"), ("float32", "int8")
    kinds = [content["samples"][model][kind] for model in models for kind in sent]
    assert all(len(values) == 3 for values in kinds)
    (one, two, three, four), (a, b, c, d) = map(fmean, kinds), map(stdev, kinds)
    assert f"accuracy of {one:.4f} with float32 and {two:.4f} with 8 bits, with standard" in text
    assert f"deviations of {a:.4f} and {b:.4f}. The loss of the GPT" in text
    assert f"is {three:.4f} and {four:.4f} after {content['settings']['steps']} steps" in text
    assert f"standard deviations of {c:.4f} and {d:.4f} (`python -m benchmarks.comp" in text


@pytest.mark.parametrize(
    ("backend", "ranks", "told"),
    [
        ("gloo", 2, "`Reducer` {Reducer, views} and `ddp.SGD` {Reducer and ddp.SGD}: no "),
        (
            "gloo",
            2,
            "bf16 {Reducer, bf16}, with buckets of 1 MiB {Reducer, bf16, 1 MB buckets};",
        ),
        ("gloo", 4, "step: `Reducer` {Reducer, views}, `ddp.SGD` {Reducer and ddp.SGD}: missed"),
        ("gloo", 4, "step: gloo {Reducer, int8}, mpi"),
        ("mpi", 4, ", mpi {Reducer, int8}: missed; a step without"),
    ],
)
def test_steps_between_two_hosts_take_what_the_targets_say(backend, ranks, told):
    name = f"benchmarks/results/two_hosts-resnet18-{backend}-{ranks}-1gbit.json"
    content = json.loads((ROOT / name).read_text())
    samples = {s["name"]: Samples(s["name"], s["milliseconds"]) for s in content["samples"]}

    def ratio(match):
        middle, low, high = samples[match[1]].ratio_to(samples["torch DDP, views"])
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    assert re.sub(r"{(.*?)}", ratio, told) in (ROOT / BENCHMARKS).read_text()


def test_predictions_are_as_close_as_the_page_says():
    content = json.loads((ROOT / "benchmarks/results/what_if.json").read_text())
    ratios = [each["predicted"] / median(each["measured"]) for each in content["samples"]]
    close = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
    (page,) = [page for page in PAGES if page.name == "buckets.md"]
    assert f"{close} of {len(ratios)} are within 1.5 times the measured" in " ".join(
        page.read_text().split()
    )


def test_a_loop_of_ones_own_is_shown_with_the_lines_of_the_program():
    """A line of a diff that stays or comes is in the program, in that order."""
    program = (ROOT / "examples/train_your_own.py").read_text().splitlines()
    (page,) = [page for page in PAGES if page.name == "your-loop.md"]
    hunks = re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(hunks) > 5
    for hunk in hunks:
        shown = [line[1:] for line in hunk.splitlines() if line[0] != "-"]
        rest = iter(program)
        assert all(line in rest for line in shown), hunk
