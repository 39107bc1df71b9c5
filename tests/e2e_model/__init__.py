"""A model behind the whole program: `xserve launch`, its HTTP API, and the tokens that come out."""
