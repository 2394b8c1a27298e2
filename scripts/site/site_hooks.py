"""What the site needs beyond the pages: navigation from the headings of docs/index.md, and the files outside of docs/ that
pages link to, such as recipes/ddp_by_hand.cc. Sources become pages that show them; the others are copied."""
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
OUTSIDE = "source/"
SHOWN = {".cc": "cpp", ".h": "cpp", ".sh": "bash", ".toml": "toml", ".sbatch": "bash", ".py": "python"}


def on_config(config):
    nav, section = [{"Documentation": "index.md"}], None
    for line in (ROOT / "docs/index.md").read_text().splitlines():
        if line.startswith("## "):
            section = []
            nav.append({line[3:]: section})
        if section is not None:
            section += re.findall(r"\]\(([a-z0-9_]+\.md)\)", line)
    nav.append({"API": "api/index.html"})
    config.nav = nav
    return config


def place_of(path):
    """Where a file outside of docs/ lies in the site."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{OUTSIDE}{name}/README.md"
    return f"{OUTSIDE}{name}.md" if path.suffix in SHOWN else f"{OUTSIDE}{name}"


def content_of(path):
    if path.is_dir():
        readme = path / "README.md"
        listed = "\n".join(f"- `{entry.name}`" for entry in sorted(path.iterdir()))
        return readme.read_text() if readme.exists() else f"# {path.name}\n\n{listed}\n"
    if path.suffix in SHOWN:
        return f"# {path.relative_to(ROOT)}\n\n```{SHOWN[path.suffix]}\n{path.read_text()}\n```\n"
    return path.read_bytes()


def on_files(files, config):
    wanted = [ROOT / "docs" / page.src_path for page in files.documentation_pages()]
    done = set()
    while wanted:  # pages outside of docs/ link to others in turn
        page = wanted.pop()
        for link, _ in LINK.findall(page.read_text()) if page.suffix == ".md" else []:
            if re.match(r"[a-z]+:", link):
                continue
            path = (page.parent / link).resolve()
            if not path.exists() or path in done or not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "docs"):
                continue
            done.add(path)
            files.append(File.generated(config, place_of(path), content=content_of(path)))
            if path.suffix == ".md" or path.is_dir():
                wanted.append(path / "README.md" if path.is_dir() else path)
        wanted = [page for page in wanted if page.exists()]
    return files


def on_page_markdown(markdown, page, config, files):
    """Links that lead out of docs/ lead to the copies, and links of the copies to the originals."""
    source = page.file.src_uri
    if source.startswith(OUTSIDE):
        folder = (ROOT / source.removeprefix(OUTSIDE)).parent
    else:
        folder = (ROOT / "docs" / source).parent

    def moved(match):
        link, anchor = match[1], match[2] or ""
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        path = (folder / link).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]
        inside = path.is_relative_to(ROOT / "docs")
        target = path.relative_to(ROOT / "docs").as_posix() if inside else place_of(path)
        up = "../" * source.count("/")
        return f"]({up}{target}{anchor})"

    return LINK.sub(moved, markdown)
