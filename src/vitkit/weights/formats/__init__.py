"""Weight formats of other libraries; `registry` lists them."""
