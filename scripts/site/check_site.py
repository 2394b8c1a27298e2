#!/usr/bin/env python3
"""No link inside the built site is dead.     scripts/site/check_site.py build/docs"""
import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.anchors = [], set()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.update(values[key] for key in ("id", "name") if values.get(key))
        link = values.get("href") if tag in {"a", "link"} else values.get("src") if tag in {"img", "script"} else None
        if link:
            self.links.append(link)


def read(path):
    page = Page()
    page.feed(path.read_text(errors="replace"))
    return page


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    pages = {path: read(path) for path in sorted(root.rglob("*.html"))}
    # Doxygen's own pages are its affair; that they exist is ours.
    dead = []
    for path, page in pages.items():
        if "api" in path.relative_to(root).parts or path.name == "404.html":
            continue
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                dead.append(f"{path.relative_to(root)}: {link}")
            elif parts.fragment and target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].anchors \
                    and not parts.fragment.startswith("__"):
                dead.append(f"{path.relative_to(root)}: {link}: no such heading")
    for line in dead:
        print(f"check_site: {line}", file=sys.stderr)
    if dead or len(pages) < 2:
        sys.exit(1)
    print(f"check_site: {len(pages)} pages, no dead link")


if __name__ == "__main__":
    main()
