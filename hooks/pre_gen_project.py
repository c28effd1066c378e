"""Refuse answers that could not become a project, before anything is written."""

import re
import sys

slug = "{{ cookiecutter.project_slug }}"
name = "{{ cookiecutter.project_name | replace('\\', '\\\\') | replace('"', '\\"') }}"

if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", slug):
    sys.exit(
        f"project_slug {slug!r} cannot name a package: use small letters, digits and single hyphens, "
        "starting with a letter, such as 'my-training'."
    )
if not name.strip():
    sys.exit("project_name is empty: give the name people will read, such as 'My Training'.")
