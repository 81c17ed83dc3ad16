"""One file per architecture, each with `cut(model) -> Cut`. Imports what `presets` may import, and
`presets` itself."""
