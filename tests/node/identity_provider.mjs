// A real OpenID provider (npm's oidc-provider) for test_sign_in.py: one client that signs people in with PKCE, and one that
// gets JWTs for itself. People are known by any name, in the groups that the name has behind a colon: "ada:admins,staff".
// Arguments: the redirect URI. It prints its issuer, and ends with its standard input.

import { createServer } from "node:http";

import Provider from "oidc-provider";

const api = { scope: "", audience: "tollgate-api", accessTokenTTL: 300, accessTokenFormat: "jwt", jwt: { sign: { alg: "RS256" } } };
const server = createServer().listen(0, "127.0.0.1", () => {
  const provider = new Provider(`http://127.0.0.1:${server.address().port}`, {
    clients: [
      { client_id: "tollgate", client_secret: "a secret & more", redirect_uris: [process.argv[2]] },
      { client_id: "job", client_secret: "of a job", grant_types: ["client_credentials"], redirect_uris: [], response_types: [] },
    ],
    claims: { openid: ["sub"], email: ["email", "email_verified"], profile: ["groups"] },
    conformIdTokenClaims: false,
    cookies: { keys: ["of the tests"] },
    pkce: { required: () => true },
    features: {
      clientCredentials: { enabled: true },
      resourceIndicators: { enabled: true, defaultResource: () => "https://api.test", getResourceServerInfo: () => api, useGrantedResource: () => true },
    },
    extraTokenClaims: (ctx, token) => (token.kind === "ClientCredentials" ? { groups: ["services"] } : undefined),
    findAccount: (ctx, id) => {
      const [name, groups = ""] = id.split(":");
      return { accountId: id, claims: () => ({ sub: id, email: `${name}@company.test`, email_verified: true, groups: groups.split(",") }) };
    },
    ttl: { Session: 60, Interaction: 60, Grant: 60, AccessToken: 60, IdToken: 60, AuthorizationCode: 30 },
  });
  server.on("request", provider.callback());
  console.log(provider.issuer);
});
process.stdin.on("end", () => process.exit(0)).resume();
