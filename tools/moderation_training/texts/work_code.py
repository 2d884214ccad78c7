# Small pieces of code in several languages, written for this project: what a classifier must let pass. Slots as in
# ``work``.

from __future__ import annotations

_CODE = r"""
#include <stdio.h>
int main(void) {
    char *name = malloc(64);
    if (name == NULL) { fprintf(stderr, "out of memory\n"); exit(1); }
    printf("hello %s\n", name);
    free(name);
    return 0;
}
-----
static int kill_child(pid_t pid) {
    if (kill(pid, SIGTERM) == -1 && errno != ESRCH) return -1;
    return waitpid(pid, NULL, 0);
}
-----
template <typename T> class Stack {
public:
    void push(const T& value) { items_.push_back(value); }
    T pop() { T last = items_.back(); items_.pop_back(); return last; }
private:
    std::vector<T> items_;
};
-----
async function fetchOrders(userId) {
  const response = await fetch(`/api/users/${userId}/orders`);
  if (!response.ok) throw new Error(`status ${response.status}`);
  return (await response.json()).filter((order) => order.total > 0);
}
-----
export const Button: React.FC<Props> = ({ label, onClick, disabled }) => {
  const [count, setCount] = useState<number>(0);
  useEffect(() => { document.title = `${count} clicks`; }, [count]);
  return <button className="primary" disabled={disabled} onClick={() => setCount(count + 1)}>{label}</button>;
};
-----
document.querySelectorAll("form").forEach((form) => {
  form.addEventListener("submit", (event) => { event.preventDefault(); send(new FormData(form)); });
});
-----
const transporter = nodemailer.createTransport({ host: "smtp.example.com", port: 587 });
await transporter.sendMail({ from: "$mail", to: "$mail2", subject: "Your $thing", text: "See $link" });
-----
package main

import ("fmt"; "net/http"; "log")

func main() {
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hi %s", r.URL.Path) })
	log.Fatal(http.ListenAndServe(":8080", nil))
}
-----
func (s *Store) Get(ctx context.Context, id string) (*Item, error) {
	row := s.db.QueryRowContext(ctx, "select id, name from items where id = $1", id)
	var item Item
	if err := row.Scan(&item.ID, &item.Name); err != nil { return nil, fmt.Errorf("get %s: %w", id, err) }
	return &item, nil
}
-----
use std::collections::HashMap;

fn count(words: &[String]) -> HashMap<&str, usize> {
    let mut seen = HashMap::new();
    for word in words { *seen.entry(word.as_str()).or_insert(0) += 1; }
    seen
}
-----
impl<T: Clone> Queue<T> {
    pub fn pop(&mut self) -> Option<T> { unsafe { self.items.get_unchecked(0).clone().into() } }
    pub fn drop_all(self) -> Result<(), Error> { drop(self); Ok(()) }
}
-----
public class AccountService {
    private final AccountRepository repository;
    @Override
    @Transactional
    public void transfer(long from, long to, BigDecimal amount) throws NotFoundException {
        Account source = repository.findById(from).orElseThrow(NotFoundException::new);
        source.withdraw(amount);
        repository.save(source);
    }
}
-----
public static string Reverse(this string text) =>
    new string(text.Reverse().ToArray()); // extension method
-----
SELECT c.name, COUNT(*) AS orders, SUM(o.total) AS revenue
FROM customers c JOIN orders o ON o.customer_id = c.id
WHERE o.created_at >= '2026-01-01' AND c.email LIKE '%@example.com'
GROUP BY c.name HAVING COUNT(*) > 3 ORDER BY revenue DESC LIMIT 10;
-----
ALTER TABLE users ADD COLUMN last_login timestamptz;
UPDATE users SET email = '$mail' WHERE id = $k;
DELETE FROM sessions WHERE expires_at < now();
DROP INDEX IF EXISTS sessions_user_id;
-----
#!/bin/bash
set -euo pipefail
for file in "$@"; do
  [ -f "$file" ] || { echo "no such file: $file" >&2; exit 1; }
  gzip -9 "$file" && mv "$file.gz" /backup/
done
-----
curl -X POST $link -H "Content-Type: application/json" -d '{"email": "$mail", "active": true}'
kubectl get pods -n $unit | grep -v Running | awk '{print $1}' | xargs kubectl delete pod
-----
ssh -i ~/.ssh/id_ed25519 $unit@host$n.example.org 'sudo systemctl restart $unit && journalctl -u $unit -n 50'
-----
FROM python:3.11-slim
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
USER nobody
CMD ["python", "-m", "$unit", "--port", "8080"]
-----
version: "3.9"
services:
  $unit:
    image: postgres:16
    environment:
      POSTGRES_USER: app
    ports: ["5432:5432"]
    restart: always
-----
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>$thing</title><link rel="stylesheet" href="style.css"></head>
<body><p>Write to <a href="mailto:$mail">$mail</a> or visit <a href="$link">our page</a>.</p></body>
</html>
-----
.button { display: flex; padding: 8px 16px; border-radius: 4px; background: #0a66c2; color: white !important; }
.button:hover, .button:focus { opacity: 0.9; }
-----
def parse_args():
    parser = argparse.ArgumentParser(description="Send the $thing to everybody.")
    parser.add_argument("--to", default="$mail")
    parser.add_argument("--ignore-errors", action="store_true")
    return parser.parse_args()
-----
class Prompt(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str

messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": question}]
reply = client.chat.completions.create(model="small", messages=messages, temperature=0)
-----
df = pd.read_csv("$thing.csv")
df = df[df["score"] > 0.5].groupby("city")["price"].mean().reset_index()
df.plot(kind="bar", x="city", y="price")
-----
@pytest.mark.parametrize("text", ["", " ", "a" * 1000])
def test_anything_is_read(text):
    with pytest.raises(ValueError, match="empty"):
        read(text)
-----
diff --git a/$unit.py b/$unit.py
@@ -$n,7 +$n,8 @@ def send(to):
-    return mail(to)
+    if not to:
+        raise ValueError("no address")
+    return mail(to, copy="$mail")
-----
<?php
$user = User::where('email', $request->input('email'))->firstOrFail();
Mail::to($user)->send(new OrderShipped($order));
return redirect()->route('orders.index')->with('status', 'Sent!');
-----
class UsersController < ApplicationController
  before_action :authenticate_user!, except: [:index]
  def destroy
    User.find(params[:id]).destroy
    redirect_to users_path, notice: "Deleted."
  end
end
-----
fun main() { val ages = mapOf("Ann" to 31, "Bob" to 29); ages.forEach { (k, v) -> println(k + v) } }
-----
guard let url = URL(string: "$link") else { return }
let (data, _) = try await URLSession.shared.data(from: url)
let items = try JSONDecoder().decode([Item].self, from: data)
-----
[package]
name = "$unit"
version = "0.$n.1"
authors = ["$name <$mail>"]

[dependencies]
serde = { version = "1", features = ["derive"] }
-----
server {
    listen 443 ssl;
    server_name example.org;
    location / { proxy_pass http://127.0.0.1:8080; proxy_set_header Host $host; }
}
-----
library(ggplot2)
model <- lm(price ~ area + rooms, data = houses)
summary(model)
ggplot(houses, aes(area, price)) + geom_point() + geom_smooth(method = "lm")
"""
SNIPPETS = tuple(piece.strip("\n") for piece in _CODE.split("-----\n"))
