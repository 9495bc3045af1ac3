"""`gare serve`: a library of videos as a web page and a REST API. `app.create_app` makes it."""
