"""Leave out the scripts of what the book does not use: Thebe is declared
twice by its extension, which raises an error in every page's console."""


def wanted(js) -> bool:
    "Whether a script of the page belongs to something the book uses."
    text = f"{js.filename or ''} {js.attributes.get('body', '')}"
    return "thebe" not in text.lower()


def drop(app, page, template, context, doctree):
    scripts = context.get("script_files", [])
    context["script_files"] = [
        js for js in scripts if not hasattr(js, "attributes") or wanted(js)]


def setup(app):
    app.connect("html-page-context", drop, priority=900)
    return {"version": "1", "parallel_read_safe": True,
            "parallel_write_safe": True}
