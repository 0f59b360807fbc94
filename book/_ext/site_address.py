"""The addresses that the repository's owner decides: that of the repository,
that of the published book, and the buttons and tags of a page that name them.

`settings.ini` holds the owner. While none is set there are no such addresses: a
page then has no button that leads to the repository, and the site has no map.
"""

from __future__ import annotations

from configparser import ConfigParser
from functools import partial
from pathlib import Path

# these two write whole addresses, and have nothing to write without an owner
EXTENSIONS = ("sphinxext.opengraph", "sphinx_sitemap")
NOT_ON_THE_MAP = [
    "404.html",
    "search.html",
    "genindex.html",
    "py-modindex.html",
    "_modules/*",
]


def read_owner(root: Path) -> str:
    "The owner of the repository, or the empty string while none is set."
    settings = ConfigParser(delimiters="=", interpolation=None)
    settings.read(Path(root) / "settings.ini", encoding="utf-8")
    return settings["DEFAULT"]["owner"]


def repository_url(owner: str) -> str:
    return f"https://github.com/{owner}/tformer"


def book_url(owner: str) -> str:
    return f"https://{owner}.github.io/tformer/"


def name_owner(owner: str, app, config):
    "Set what makes buttons, canonical addresses, tags for sharing and the map."
    config.html_theme_options |= {
        "repository_url": repository_url(owner),
        "repository_branch": "main",
        "use_repository_button": True,
        "use_issues_button": True,
        "use_edit_page_button": True,
        "launch_buttons": {
            "notebook_interface": "jupyterlab",
            "colab_url": "https://colab.research.google.com",
            "binderhub_url": "https://mybinder.org",
        },
    }
    config.html_baseurl = book_url(owner)
    config.sitemap_url_scheme = "{link}"
    config.sitemap_excludes = NOT_ON_THE_MAP
    config.ogp_site_url = book_url(owner)
    config.ogp_site_name = config.project
    config.ogp_image = f"{book_url(owner)}_static/card.png"
    config.ogp_social_cards = {"enable": False}
    config.ogp_custom_meta_tags = [
        '<meta name="twitter:card" content="summary_large_image" />'
    ]


def remove_map(app, exception):
    "Remove the map that an earlier build, with an owner, has left."
    (Path(app.outdir) / "sitemap.xml").unlink(missing_ok=True)


def setup(app):
    owner = read_owner(app.srcdir)
    if owner:
        for extension in EXTENSIONS:
            app.setup_extension(extension)
        # before the theme reads its options
        app.connect("config-inited", partial(name_owner, owner), priority=100)
    else:
        app.connect("build-finished", remove_map)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
