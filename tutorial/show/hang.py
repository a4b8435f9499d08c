"""Prints and draws chapter 9: how each program ends, and what its tool reports."""

import re

from tutorial import pictures


def reason(error):
    """Returns what an error says about the ranks' calls, in lines; "" for gloo's own errors."""
    if "failed: " in error:  # the library's
        said = error.split("failed: ")[1]
        said = re.sub(r"; rank \d+ is in .*", "", said)  # it may have given up in the meantime
        return ":\n    " + said.replace("; ", ";\n    ")
    # Torch's, without the device and layout of each tensor.
    call = r"Rank (\d+) is running collective: \w+\((.*?), TensorDeviceTypes"
    calls = [f"rank {rank}: {what}" for rank, what in re.findall(call, error)]
    return ":\n    " + "\n    ".join(calls) if calls else ""


def without_folders(text):
    """Returns the text without the folders of this machine: /home/me/hang.py:49 is hang.py:49."""
    return re.sub(r"(?<!\w)/\S*/", "", text)


def show(found, path):
    """Shows `{program: for each rank (line, spans, stall report, flight record, end)}`."""
    for name, ranks in found.items():
        print(name)
        for rank, (line, _, printed, record, error) in enumerate(ranks):
            print(f"  rank {rank}: {error}")
            if name == "checkpoint":
                print(f"    in {line}")
            if name == "uneven" and printed:
                print("    " + without_folders(printed.strip()).replace("\n", "\n    "))
            if name == "lost_error":
                print(f"    {record}")
    panels = {
        name: {f"rank {rank}": spans for rank, (_, spans, *_) in enumerate(ranks)}
        for name, ranks in found.items()
    }
    pictures.timelines(path, panels)
