"""Two repairs that keep every page's console free of errors: leave out the
scripts of Thebe, which its extension declares twice and the book does not use,
and name the color mode that the theme starts with."""


def wanted(js) -> bool:
    "Whether a script of the page belongs to something the book uses."
    text = f"{js.filename or ''} {js.attributes.get('body', '')}"
    return "thebe" not in text.lower()


def drop(app, page, template, context, doctree):
    scripts = context.get("script_files", [])
    context["script_files"] = [
        js for js in scripts if not hasattr(js, "attributes") or wanted(js)]
    context.setdefault("default_mode", "auto")


def setup(app):
    app.connect("html-page-context", drop, priority=900)
    return {"version": "1", "parallel_read_safe": True,
            "parallel_write_safe": True}
