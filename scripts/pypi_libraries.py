"""Brings Python packages from PyPI into a folder, for scripts that compare Phalanx with other programs.

    import pypi_libraries
    pypi_libraries.bring(cache / "python", ["jinja2==3.1.6"], without_torch=["transformers==5.0.0"])
    import transformers

A script ends with status 77, as skipped, where there is no network.
"""

import subprocess
import sys

SKIPPED = 77


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        skip(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'failed'}")


def bring(folder, libraries, without_torch=()):
    """Installs them once, and puts the folder in front of sys.path. No package may bring torch, which takes gigabytes:
    those of the second list, which ask for it, come without what they depend on."""
    done, wanted = folder / "done", "\n".join([*libraries, *without_torch])
    if not done.exists() or done.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "constraints.txt").write_text("torch<0\n")
        pip("install", "--target", folder, "--upgrade", "--constraint", folder / "constraints.txt", *libraries)
        if without_torch:
            pip("install", "--target", folder, "--upgrade", "--no-deps", *without_torch)
        done.write_text(wanted)
    sys.path.insert(0, str(folder))
