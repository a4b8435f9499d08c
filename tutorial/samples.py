"""Runs the programs as the pages show them, and puts into the pages what they print and draw.

    python -m tutorial.samples          all chapters, one after another; needs mpi4py and Open MPI
    python -m tutorial.samples 04 07    some of them

So a page's text and its picture come from one run. Each picture records that run: its PNG has the
command, the output and the commit. Run it while the machine has nothing else to do.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tutorial.chapters import CHAPTERS, SAMPLE, TUTORIAL, chapter, page, samples

ROOT = TUTORIAL.parent
# Open MPI refuses to run as root, as in a container, without these.
ENVIRON = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(command, folder):
    """Runs a command as a reader does, in an empty folder; returns what it prints."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    environ = os.environ | ENVIRON | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{command}: ended with {done.returncode}; its page stays as it is")
    return done.stdout


def record(drawn, target, **about):
    """Copies a picture, and records in it the run that it comes from."""
    from PIL import Image, PngImagePlugin  # comes with matplotlib

    info = PngImagePlugin.PngInfo()
    for name, text in about.items():
        info.add_text(name, text)
    with Image.open(drawn) as image:
        image.save(target, pnginfo=info)


def sample(folder, commit):
    """Runs the commands of a chapter's page, then replaces its samples and pictures."""
    text = page(folder).read_text()
    printed = []
    with tempfile.TemporaryDirectory() as place:
        for shown in samples(text):
            print(shown.command, flush=True)
            printed.append(run(shown.command, place))
            for picture in shown.pictures:
                about = {"Command": shown.command, "Output": printed[-1], "Commit": commit}
                record(Path(place, "tutorial-pictures", picture), folder / picture, **about)

    def replaced(match):
        begin = match.start("printed") - match.start()
        end = match.end("printed") - match.start()
        return match[0][:begin] + printed.pop(0) + match[0][end:]

    page(folder).write_text(SAMPLE.sub(replaced, text))


def main():
    """Samples the chapters that are named, or all."""
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(print(__doc__))
    folders = [chapter(number) for number in sys.argv[1:]] or CHAPTERS
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.check_output(describe, cwd=ROOT, text=True).strip()
    for folder in folders:
        sample(folder, commit)


if __name__ == "__main__":
    main()
