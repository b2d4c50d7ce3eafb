"""How Sphinx builds the documentation: `make docs`."""

import lox

project = "lox"
author = "the lox developers"
copyright = "the lox developers"
version = release = lox.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # so that a link to a heading that is not there is a warning, and so an error

default_role = "code"  # in docstrings, `x` is code
add_module_names = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the arguments are described in words, and the signature has their names and defaults
napoleon_use_rtype = False
napoleon_use_ivar = True  # what is described as an attribute, and is a property too, is one thing
python_display_short_literal_types = True

# Code is copied as it would be typed, without prompts and outputs.
copybutton_prompt_text = r">>> |\.\.\. ?|\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines the names of modules, as if they were links
html_title = f"lox {release}"
html_static_path = ["_static"]
html_css_files = ["lox.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
html_copy_source = False

# A tracker's or a publisher's page may answer robots with an error: it is not dead.
linkcheck_timeout = 20
linkcheck_retries = 2
