"""Tokens of providers by their documented forms, made up from a seed, and what is as random and none: what the rules
for secrets are measured by.

A form is written as its text with fields: ``{a36}`` is 36 letters and digits, ``{L34}`` letters, ``{l8}`` small letters
and digits, ``{u16}`` capitals and digits, ``{k16}`` base32, ``{d10}`` digits, ``{h32}`` hexadecimal, ``{w22}`` letters,
digits, ``-`` and ``_``, ``{b86}`` base64.
"""

from __future__ import annotations

import base64
import random
import re
import string
import textwrap
from collections.abc import Callable
from uuid import UUID

FORMS = """\
AWS access key|AKIA{k16}
AWS session key|ASIA{k16}
AWS Bedrock key|ABSK{b132}
GitHub personal|ghp_{a36}
GitHub OAuth|gho_{a36}
GitHub user to server|ghu_{a36}
GitHub server to server|ghs_{a36}
GitHub refresh|ghr_{a76}
GitHub fine-grained|github_pat_{a22}_{a59}
GitLab personal|glpat-{w20}
GitLab personal, routable|glpat-{w27}.{d2}.{l9}
GitLab pipeline trigger|glptt-{h40}
GitLab deploy|gldt-{w20}
GitLab runner|glrt-{w20}
GitLab runner registration|GR1348941{w20}
GitLab OAuth application|gloas-{h64}
GitLab feed|glft-{w20}
GitLab agent|glagent-{w50}
GitLab CI job|glcbt-{h2}_{w20}
Bitbucket app password|ATBB{a32}
Atlassian API|ATATT3xFfGF0{w180}
Slack bot|xoxb-{d12}-{d13}-{a24}
Slack user|xoxp-{d12}-{d12}-{d13}-{h32}
Slack app|xapp-1-A{u10}-{d13}-{h64}
Slack rotating|xoxe.xoxp-1-{a160}
Slack webhook|https://hooks.slack.com/services/T{u10}/B{u10}/{a24}
Discord bot|M{a23}.{a6}.{w38}
Discord webhook|https://discord.com/api/webhooks/{d18}/{w68}
Telegram bot|{d10}:AA{w33}
Teams webhook|https://contoso.webhook.office.com/webhookb2/{h8}-{h4}-{h4}-{h4}-{h12}@{h8}-{h4}-{h4}-{h4}-{h12}/IncomingWebhook/{h32}
Stripe live|sk_live_{a99}
Stripe restricted|rk_live_{a99}
Stripe webhook|whsec_{a32}
Square access|EAAA{w60}
Square secret|sq0csp-{w43}
PayPal Braintree|access_token$production${a16}${h32}
Razorpay|rzp_live_{a14}
Plaid|access-production-{h8}-{h4}-{h4}-{h4}-{h12}
Flutterwave|FLWSECK-{h32}-X
Shopify|shpat_{h32}
OpenAI project|sk-proj-{w74}T3BlbkFJ{w74}
OpenAI service account|sk-svcacct-{w74}T3BlbkFJ{w74}
OpenAI admin|sk-admin-{w74}T3BlbkFJ{w74}
OpenAI legacy|sk-{a20}T3BlbkFJ{a20}
Anthropic|sk-ant-api03-{w93}AA
Anthropic admin|sk-ant-admin01-{w93}AA
Google API|AIza{w35}
Google OAuth access|ya29.{w120}
Google OAuth secret|GOCSPX-{w28}
Google Gemini, new|AQ.Ab8{w50}
Hugging Face|hf_{L34}
Hugging Face organisation|api_org_{L34}
Groq|gsk_{a52}
xAI|xai-{a80}
Perplexity|pplx-{a48}
NVIDIA|nvapi-{w64}
OpenRouter|sk-or-v1-{h64}
Replicate|r8_{a37}
Together|tgp_v1_{w43}
Fireworks|fw_{a22}
Cerebras|csk-{l48}
DeepSeek|sk-{h32}
ElevenLabs|sk_{h48}
LangSmith|lsv2_pt_{h32}_{h10}
Langfuse|sk-lf-{h8}-{h4}-{h4}-{h4}-{h12}
Pinecone|pcsk_{a6}_{a63}
Tavily|tvly-{a32}
Tavily, new|tvly-dev-{a32}
Firecrawl|fc-{h32}
Jina|jina_{h32}{w28}
Voyage|pa-{w43}
Weights & Biases, new|wandb_v1_{w70}
npm|npm_{a36}
PyPI|pypi-AgEIcHlwaS5vcmc{w150}
RubyGems|rubygems_{h48}
crates.io|cio{a32}
NuGet|oy2{l43}
Docker personal|dckr_pat_{w27}
Docker organisation|dckr_oat_{w32}
Clojars|CLOJARS_{h60}
SendGrid|SG.{w22}.{w43}
Mailgun|key-{h32}
Mailchimp|{h32}-us21
Brevo|xkeysib-{h64}-{a16}
Resend|re_{a8}_{a24}
Postmark|X-Postmark-Server-Token: {h8}-{h4}-{h4}-{h4}-{h12}
Twilio|SK{h32}
DigitalOcean|dop_v1_{h64}
Heroku|HRKU-AA{w58}
Netlify|nfp_{a36}
Vercel|vcp_{a56}
Fly.io|FlyV1 fm2_{b120}
Render|rnd_{a28}
Cloudflare origin CA|v1.0-{h24}-{h146}
Alibaba|LTAI{a20}
Tencent|AKID{a32}
Databricks|dapi{h32}
Azure storage|AccountKey={b86}==
Azure service bus|SharedAccessKey={b43}=
Azure AD client secret|{a3}8Q~{w34}
Azure SAS|?sv=2022-11-02&ss=b&srt=sco&sp=rl&se=2026-01-01T00:00:00Z&sig={a43}%3D
Azure API management, in a header|Ocp-Apim-Subscription-Key: {h32}
Supabase|sbp_{h40}
Supabase secret|sb_secret_{w22}_{a8}
PlanetScale|pscale_tkn_{w43}
PlanetScale password|pscale_pw_{w43}
Neon|napi_{l64}
MongoDB|mongodb+srv://app:{a16}@cluster0.abcde.mongodb.net/x
Redis|redis://default:{a32}@redis-12345.c1.us-east-1-2.ec2.cloud.example.com:12345
Vault service|hvs.{w90}
Vault batch|hvb.{w140}
Terraform Cloud|{a14}.atlasv1.{w64}
Pulumi|pul-{h40}
Doppler|dp.pt.{a43}
Doppler service|dp.st.prd.{a43}
1Password service account|ops_eyJ{b250}
age|AGE-SECRET-KEY-1{u58}
Grafana service account|glsa_{a32}_{h8}
Grafana cloud|glc_eyJ{b100}
New Relic|NRAK-{u27}
New Relic licence|{h36}FFFFNRAL
Datadog, in the environment|DD_API_KEY={h32}
Sentry organisation|sntrys_eyJ{b80}_{b43}
Sentry user|sntryu_{h64}
Honeycomb|hcaik_01{l58}
Dynatrace|dt0c01.{u24}.{u64}
PostHog personal|phx_{a43}
Linear|lin_api_{a40}
Notion|ntn_{a46}
Notion, old|secret_{a43}
Figma|figd_{w40}
Postman|PMAK-{h24}-{h34}
Airtable|pat{a14}.{h64}
HubSpot|pat-na1-{h8}-{h4}-{h4}-{h4}-{h12}
ClickUp|pk_{d8}_{u32}
Contentful|CFPAT-{w43}
Typeform|tfp_{a44}_{a14}
Dropbox|sl.u.{w130}
Facebook|EAA{a160}
Buildkite|bkua_{h40}
CircleCI|CCIPAT_{a22}_{h40}
SonarQube|sqp_{h40}
Snyk, in the environment|SNYK_TOKEN={h8}-{h4}-{h4}-{h4}-{h12}
Artifactory|AKCp{a69}
Tailscale|tskey-auth-{a12}CNTRL-{a32}
Sourcegraph|sgp_{h16}_{h40}
Apify|apify_api_{a36}
Mapbox|sk.eyJ1{w60}.{w22}
EasyPost|EZAK{a54}
Shippo|shippo_live_{h40}
Lob|live_{h35}
Algolia, in code|algolia_api_key = "{h32}"
Okta, in code|Authorization: SSWS 00{w40}
JWT|eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{w43}
RSA key|-----BEGIN RSA PRIVATE KEY-----
OpenSSH key|-----BEGIN OPENSSH PRIVATE KEY-----
PGP key|-----BEGIN PGP PRIVATE KEY BLOCK-----
PuTTY key|PuTTY-User-Key-File-3: ssh-ed25519
WireGuard|PrivateKey = {b43}=
Git remote|https://oauth2:{a40}@gitlab.example.com/team/repo.git
npm configuration|//registry.example.com/:_authToken={a36}
Docker configuration|"auth": "{login}"
Kubernetes secret|password: {a24}
Environment|JWT_SECRET={a32}
Header|Authorization: Bearer {w40}
Header, basic|Authorization: Basic {login}
AWS secret|aws_secret_access_key = {b40}
PostgreSQL|postgresql://app:{a16}@db.example.com:5432/app
"""

_SIGNS = {
    "a": string.ascii_letters + string.digits,
    "L": string.ascii_letters,
    "l": string.ascii_lowercase + string.digits,
    "u": string.ascii_uppercase + string.digits,
    "k": string.ascii_uppercase + "234567",
    "d": string.digits,
    "h": "0123456789abcdef",
    "w": string.ascii_letters + string.digits + "-_",
    "b": string.ascii_letters + string.digits + "+/",
}
_LOGIN = "ZGVwbG95Om9uZS1yYW5kb20tcGFzc3dvcmQtNDI="  # deploy:one-random-password-42


def tokens(seed: int) -> list[tuple[str, str]]:
    """Return what each form is of, and a token of it."""
    dice = random.Random(seed)

    def drawn(field: re.Match[str]) -> str:
        return "".join(dice.choices(_SIGNS[field[1]], k=int(field[2])))

    forms = [line.split("|", 1) for line in FORMS.splitlines()]
    return [(name, re.sub(r"\{(\w)(\d+)\}", drawn, form).replace("{login}", _LOGIN)) for name, form in forms]


def harmless(seed: int) -> dict[str, str]:
    """Return what is as random as a token, and none: some 2,000 characters of each kind."""
    dice = random.Random(seed)

    def of(signs: str, count: int) -> str:
        return "".join(dice.choices(_SIGNS[signs], k=count))

    def lines(make: Callable[[], str]) -> str:
        return "\n".join(make() for _ in range(24))

    def uuid() -> str:
        return str(UUID(int=dice.getrandbits(128), version=4))

    def word() -> str:
        return dice.choice(_NAMES)

    def base64_of(size: int) -> str:
        return base64.b64encode(dice.randbytes(size)).decode()

    log = "2026-{:02}-{:02}T{:02}:{:02}:{:02}.{:06}Z INFO {}[{}] request_id={} trace={} span={} took={}us status=200 {}"
    return {
        "UUIDs": lines(lambda: f"item: {uuid()}"),
        "logs": lines(
            lambda: log.format(
                *(dice.randint(1, 12), dice.randint(1, 28), dice.randint(0, 23), dice.randint(0, 59)),
                *(dice.randint(0, 59), dice.randint(0, 999_999), word(), dice.randint(2, 99_999), uuid()),
                *(of("h", 32), of("h", 16), dice.randint(9, 10**7), f"/v1/{word()}/{uuid()}"),
            )
        ),
        "commits": lines(lambda: f"{of('h', 40)} {word()}: {word()} {word()} (#{dice.randint(1, 9999)})"),
        "checksums": lines(lambda: f"{of('h', 64)}  dist/{word()}-{dice.randint(0, 9)}.{dice.randint(0, 30)}.tar.gz"),
        "pip locks": lines(lambda: f"    --hash=sha256:{of('h', 64)} \\"),
        "npm locks": lines(
            lambda: (
                f'"node_modules/{word()}": {{"version": "{dice.randint(0, 20)}.{dice.randint(0, 20)}.1", "resolved": '
                f'"https://registry.npmjs.org/{word()}/-/{word()}-1.2.3.tgz", "integrity": "sha512-{base64_of(64)}"}}'
            )
        ),
        "go.sum": lines(lambda: f"github.com/{word()}/{word()} v1.{dice.randint(0, 30)}.0 h1:{base64_of(32)}"),
        "a picture in base64": "<img src='data:image/png;base64,iVBORw0KGgo" + base64_of(1400) + "'>",
        "a certificate": "-----BEGIN CERTIFICATE-----\n" + "\n".join(textwrap.wrap(base64_of(900), 64)),
        "names in code": lines(
            lambda: f"{word()}_{word()}_{word()} = {word()}.{word()}.{word()}_{word()}({word()}_{word()})"
        ),
        "names of classes": lines(
            lambda: f'<div class="{word()}-{word()}-{word()}--{word()} {word()}__{word()}-{word()}">'
        ),
        "numbers": lines(
            lambda: f"{dice.random():.17f}, {dice.getrandbits(63)}, {dice.getrandbits(31)}, {dice.random():.6e}"
        ),
        "ids of calls": lines(
            lambda: f'{{"id": "call_{of("a", 24)}", "run": "chatcmpl-{of("a", 29)}", "at": 17{of("d", 11)}}}'
        ),
        "assignments": lines(lambda: f"{word()}_token = self.{word()}_{word()}[{word()}]; password: {word()}-{word()}"),
        "addresses": lines(
            lambda: f"https://{word()}.example.com/{word()}/{of('a', 22)}?page={of('h', 12)}&v={of('d', 5)}"
        ),
    }


_NAMES = re.findall(
    r"\w+",
    """
    task risk disk desk mask skip asks path pattern patch pat live alive archive key keys token tokens secret secrets
    password re more core store rnd found fc fw pa spa sk task_id sq square nfp help ntn user ghost hash cache index
    model layer weight config access refresh client server render resend figd docker vault grafana sentry notion
    """,
)
