# Models, endpoints and names that a request may mean, and what requests need of them.
